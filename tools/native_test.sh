#!/usr/bin/env bash
# The C++ tests, the benchmark of pool and slots, and the vendoring example both ways. No Python is used by what is built.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
cmake=${CMAKE:-cmake}

configure() { "$cmake" -G Ninja "$@" >/dev/null; }
build() { "$cmake" --build "$1" -- --quiet; }

# One build: the library as a part of another project, with its tests and benchmark.
configure -S examples/vendoring -B build/native-test -DSIC_SOURCE_DIR="$root" -DSIC_TESTS=ON -DSIC_BENCH=ON \
  -DSIC_INSTALL=ON -DSIC_CUDA=OFF -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$root/build/native-install"
build build/native-test

echo "-- C++ tests"
build/native-test/sic_kernels/csrc_tests/sic_tests --gtest_brief=1

echo "-- pool and slots"
build/native-test/sic_kernels/pool_bench

echo "-- vendoring by add_subdirectory"
build/native-test/decode_step

echo "-- vendoring by find_package"
rm -rf build/native-install
"$cmake" --install build/native-test --component dev >/dev/null
configure -S examples/vendoring -B build/vendoring-package -DCMAKE_BUILD_TYPE=Release \
  -Dsic_kernels_DIR="$root/build/native-install/lib/cmake/sic_kernels"
build build/vendoring-package
build/vendoring-package/decode_step

if ldd build/vendoring-package/decode_step build/native-test/decode_step | grep -Ei 'python|torch'; then
  echo "the vendored program links Python or torch" >&2
  exit 1
fi
