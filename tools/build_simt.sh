#!/usr/bin/env bash
# The CUDA kernels for the emulator: runs the emulator's own tests and puts the module _simt beside the Python files.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
build=build/simt

cmake -G Ninja -S . -B "$build" -DSIC_SIMT=ON -DSIC_TESTS=ON -DSIC_PYTHON=ON -DSIC_CUDA=OFF \
  -DPython_EXECUTABLE="$(command -v "$python")" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >/dev/null
cmake --build "$build" --target _simt sic_simt_tests -- --quiet

echo "-- tests of the emulator"
"$build/csrc_tests/sic_simt_tests" --gtest_brief=1

# By renaming: a process that has the old file open keeps it.
for module in "$build"/csrc/simt/_simt.*.so; do
  cp "$module" "sic_kernels/.$(basename "$module")"
  mv "sic_kernels/.$(basename "$module")" "sic_kernels/$(basename "$module")"
done
