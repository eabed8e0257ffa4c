#!/usr/bin/env bash
# Builds the native tests with address and undefined-behaviour sanitizers and runs them.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
"$bin/cmake" -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$bin/python" -DCALSTACK_SANITIZE=ON >/dev/null
"$bin/ninja" -C build/sanitize kernel_test attention_test
build/sanitize/native/kernel_test
build/sanitize/native/attention_test
