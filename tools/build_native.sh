#!/usr/bin/env bash
# Builds the compiled module into src/calstack/native/, incrementally. Run by `make native`; --check only looks for a compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
if [[ -z ${CXX:-} ]] && ! command -v c++ g++ clang++ >/dev/null 2>&1; then
  echo "calstack: no C++ compiler found; on Debian or Ubuntu: apt-get install g++ (elsewhere install g++ or clang++, or set CXX)" >&2
  exit 1
fi
[[ ${1:-} == --check ]] && exit
mkdir -p build/native
exec 9>build/native.lock
flock 9 # two builds at once would write the same objects
log=build/native/build.log
run() { # quiet when all is well; the whole log when not
  "$@" >"$log" 2>&1 || { cat "$log" >&2; echo "calstack: the native build failed (log above; also in $log)" >&2; exit 1; }
}
if [[ ! -f build/native/build.ninja || build/native/build.ninja -ot .venv/.tools ]]; then # new, or .venv was made anew
  run "$bin/cmake" --fresh -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$bin/python" -DCALSTACK_INPLACE=ON
fi
if ! "$bin/ninja" -C build/native -n 2>/dev/null | grep -q 'no work to do'; then
  echo "native: building" >&2
  run "$bin/cmake" --build build/native
fi
