#!/usr/bin/env bash
# C++ tests and the Python fuzz tests against a build under AddressSanitizer. Arguments go to pytest
# (default: the fuzz tests). ISAS are the instruction sets that are built, each of which takes minutes to compile (default:
# plain and this processor's widest).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python}
build=build/asan
site=$build/site
case $(uname -m) in
  aarch64 | arm64) widest=neon ;;
  *) if grep -qsw avx512bw /proc/cpuinfo; then widest=avx512; else widest=avx2; fi ;;
esac

cmake -G Ninja -S . -B "$build" -DSIC_TESTS=ON -DSIC_PYTHON=ON -DSIC_SANITIZE=address,undefined -DSIC_INSTALL=ON -DSIC_CUDA=OFF \
  -DSIC_ISAS="${ISAS:-plain;$widest}" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$(command -v "$python")" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >/dev/null
cmake --build "$build" -- --quiet

echo "-- C++ tests under AddressSanitizer"
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
"$build/csrc_tests/sic_tests" --gtest_brief=1

echo "-- Python tests under AddressSanitizer"
rm -rf "$site"
mkdir -p "$site/sic_kernels"
cp -R sic_kernels/. "$site/sic_kernels/"
rm -f "$site"/sic_kernels/_C.*.so "$site"/sic_kernels/_simt.*.so
cmake --install "$build" --component python --prefix "$root/$site/sic_kernels" >/dev/null

# Without the current folder on the path, which holds the unsanitized package.
export PYTHONPATH=$root/$site PYTHONSAFEPATH=1
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
# Python and torch keep memory until the end, so leaks are not looked for; a bad access stops the run.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
"$python" -c 'import sic_kernels; assert "/asan/site/" in sic_kernels.__file__, sic_kernels.__file__'
# Only files with fuzz tests are collected: collecting all of them is slow here.
[ $# -gt 0 ] || set -- $(grep -lE "def test_.*fuzz" python_tests/test_*.py) -k "fuzz and not without_hypothesis"
# Not --capture=fd: the report of a sanitizer must not vanish with the process.
exec "$python" -m pytest -p no:cacheprovider --capture=sys -q "$@"
