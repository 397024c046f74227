#!/usr/bin/env bash
# The C++ tests, and the vendoring example both ways. No Python is used by what is built.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
cmake=${CMAKE:-cmake}

configure() { "$cmake" -G Ninja "$@" >/dev/null; }
build() { "$cmake" --build "$1" -- --quiet; }

echo "-- C++ tests"
configure -S . -B build/native-test -DSIC_TESTS=ON -DSIC_CUDA=OFF -DCMAKE_INSTALL_PREFIX="$root/build/native-install"
build build/native-test
build/native-test/csrc_tests/sic_tests --gtest_brief=1

echo "-- vendoring by add_subdirectory"
configure -S examples/vendoring -B build/vendoring-source -DSIC_SOURCE_DIR="$root" -DCMAKE_BUILD_TYPE=Release -DSIC_CUDA=OFF
build build/vendoring-source
build/vendoring-source/decode_step

echo "-- vendoring by find_package"
rm -rf build/native-install
"$cmake" --install build/native-test --component dev >/dev/null
configure -S examples/vendoring -B build/vendoring-package -DCMAKE_BUILD_TYPE=Release \
  -Dsic_kernels_DIR="$root/build/native-install/lib/cmake/sic_kernels"
build build/vendoring-package
build/vendoring-package/decode_step

if ldd build/vendoring-package/decode_step build/vendoring-source/decode_step | grep -Ei 'python|torch'; then
  echo "the vendored program links Python or torch" >&2
  exit 1
fi
