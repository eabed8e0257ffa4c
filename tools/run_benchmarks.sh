#!/usr/bin/env bash
# Builds and runs the microbenchmarks named (default: all); see benchmarks/README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
for name in ${@:-linear attention sampler decode pool}; do
  case $name in
    linear) target=kernel_bench ;;
    attention) target=attention_bench ;;
    sampler) target=sampler_bench ;;
    decode) target=decode_bench ;;
    pool) "$bin/python" benchmarks/pool.py; continue ;;
    *) echo "no benchmark $name; there are: linear attention sampler decode pool" >&2; exit 2 ;;
  esac
  "$bin/ninja" -C build/native "$target" >/dev/null
  "build/native/native/$target"
done
