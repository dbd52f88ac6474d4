# `make demo` and `make test` do all of their set-up themselves on Debian and Ubuntu.
# PYTHON makes the virtual environment, VENV is where it is kept.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.nvmeio-installed
# The processes that share the Python tests.
JOBS ?= 2

# ccache stands before the compilers, where it is installed or about to be.
export PATH := /usr/lib/ccache:/usr/lib64/ccache:$(PATH)

C_FILES := $(shell find include src/libnvmeio tests bench -name '*.[ch]')

ASAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	-fno-omit-frame-pointer -g
# A leak that ASan sees at the exit of a Python is Python's; without libstdc++ in front, the
# exceptions of torch end the process.
ASAN_ENVIRONMENT = ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(CURDIR)/build/asan/lib \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)"

# Python itself is not instrumented, but what it locks is seen.  libgomp's waiting is not,
# so there is no OpenMP.  Reports go into files, for pytest takes what is printed; each
# that is there in the end is a failure, also that of a child that nobody asked how it ended.
TSAN_REPORT := build/tsan/report
TSAN_ENVIRONMENT = LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" \
	TSAN_OPTIONS="exitcode=66 report_signal_unsafe=0 log_path=$(CURDIR)/$(TSAN_REPORT)" \
	PYTHONPATH=$(CURDIR)/build/tsan/lib setarch -R
TSAN_JUDGE = status=$$?; ! cat $(TSAN_REPORT).* 2>/dev/null && exit $$status
TSAN_TESTS := tests/test_model.py tests/test_handle.py tests/test_op.py tests/test_futures.py \
	tests/test_gather.py tests/test_workers.py tests/test_latencies.py tests/test_pool.py

COVERAGE_FLAGS := --coverage -O0 -fprofile-update=atomic
COVERAGE_TESTS := tests/test_file.py tests/test_openfiles.py tests/test_mounts.py \
	tests/test_gather.py tests/test_faults.py tests/test_order.py

.PHONY: demo test build test-python test-c test-c-asan test-c-tsan test-neon test-pythons
.PHONY: check-all mutants
.PHONY: docs stress-short stress stress-long replay fuzz test-deepspeed test-models
.PHONY: test-models-short test-formats test-distributed lint format sdist bench
.PHONY: asan tsan stress-asan stress-tsan build-asan build-tsan coverage clean

demo: build
	$(PY) examples/demo.py
	$(PY) examples/train_beyond_memory.py

test: test-c test-python

# torch goes first and pinned: its wheel is the largest by far, and no other requirement
# may then replace it.
$(VENV)/.nvmeio-tools: constraints.txt scripts/setup-machine
	scripts/setup-machine $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --constraint constraints.txt torch
	$(PY) -m pip install -q --upgrade setuptools Cython
	touch $@

# Beside the .pth file and the version, which is in base.h, a link to the tree is installed.
$(INSTALLED): $(VENV)/.nvmeio-tools pyproject.toml setup.py include/nvmeio/base.h \
		src/nvmeio-follow.pth src/bin/nvmeio
	$(PY) -m pip install -q --constraint constraints.txt --no-build-isolation \
		--editable '.[torch,test,dev]'
	touch $@

# What has changed is compiled, and what is made of it.
build: $(INSTALLED)
	$(PY) setup.py -q build_ext --inplace

# TESTS are some of them, which run in one process: TESTS='tests/test_file.py -k short'.
test-python: build
	$(PY) -m pytest $(or $(TESTS),-n $(JOBS)) $(COMBINATIONS)

# C_TESTS are some of them, such as C_TESTS=test_file.
test-c: $(VENV)/.nvmeio-tools
	scripts/test-c $(PY) plain $(C_TESTS)

test-c-asan: $(VENV)/.nvmeio-tools
	scripts/test-c $(PY) asan $(C_TESTS)

test-c-tsan: $(VENV)/.nvmeio-tools
	scripts/test-c $(PY) tsan $(C_TESTS)

# All of the above and below, each as long as it takes, but for hours of stress and fuzz.
check-all: COMBINATIONS := --all-combinations
check-all: test test-c-asan test-c-tsan test-deepspeed test-models test-formats test-distributed \
	test-neon lint docs sdist asan tsan stress stress-asan stress-tsan test-pythons coverage mutants

# Whether the tests notice what is wrong with each patch of tests/mutants.  MUTANTS is for
# the script, such as MUTANTS='file-*'.
mutants: build $(VENV)/.nvmeio-fuzz
	$(PY) scripts/mutants.py $(MUTANTS)

# The copy kernels of arm64, by an emulator.
ARM64_CC := aarch64-linux-gnu-gcc
test-neon:
	{ command -v $(ARM64_CC) && command -v qemu-aarch64; } || { apt-get update -q && \
		apt-get install -qy gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user; }
	mkdir -p build/c
	$(ARM64_CC) -static -std=gnu11 -D_GNU_SOURCE= -O2 -Wall -Wextra -Werror -Iinclude \
		-Isrc/libnvmeio tests/c/test_copy.c src/libnvmeio/copy*.c -o build/c/test_neon
	qemu-aarch64 build/c/test_neon

# STRESS is for pytest, such as STRESS='-k model' or STRESS='--seed 7'.
stress-short: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest -n $(JOBS) tests/stress --length short $(STRESS)

stress: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest -n $(JOBS) tests/stress --length full $(STRESS)

stress-long: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest tests/stress --length long $(STRESS)

# What a failed trial has said: SEED='test_name[parameter]:12345'.
replay: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest tests/stress --replay '$(SEED)'

# Longer: LENGTH=long; on one target alone: STRESS='-k npy'.
LENGTH ?= full
fuzz: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest tests/stress/test_fuzz.py --length $(LENGTH) $(STRESS)

# What cannot be had is tried, and told of, each time.
$(VENV)/.nvmeio-fuzz: scripts/setup-fuzz | build
	if scripts/setup-fuzz $(PY); then touch $@; fi

test-pythons: build
	scripts/test-pythons $(PY) $(COMBINATIONS)

test-deepspeed: build
	scripts/test-deepspeed $(PY) $(COMBINATIONS)

# MODELS is for pytest, such as MODELS='-k diffusers'.
test-models: build
	scripts/test-models $(PY) $(MODELS) $(COMBINATIONS)

# transformers has the most ways to load, and huggingface_hub has the functions of the others.
test-models-short: build
	scripts/test-models $(PY) -k 'variable and (transformers or hub)'

# FORMATS is for pytest, such as FORMATS='-k megatron'.
test-formats: build
	scripts/test-formats $(PY) $(FORMATS) $(COMBINATIONS)

# Some minutes: every test starts ranks of torch.
test-distributed: build
	$(PY) -m pytest $(or $(DISTRIBUTED),-n $(JOBS)) tests/distributed

build-asan: build
	CFLAGS='$(ASAN_FLAGS)' $(PY) setup.py -q build \
		--build-base build/asan --build-lib build/asan/lib

build-tsan: build
	CFLAGS='-fsanitize=thread -g -fno-omit-frame-pointer' NVMEIO_WITH_OPENMP=no \
		$(PY) setup.py -q build --build-base build/tsan --build-lib build/tsan/lib
	rm -f $(TSAN_REPORT).*

# In one process each, whose exit status tells what a sanitizer finds at its end.
asan: build-asan
	$(ASAN_ENVIRONMENT) $(PY) -m pytest -m 'not packaging' $(COMBINATIONS)

# In a child of a process with threads TSan starts none.
tsan: build-tsan
	$(TSAN_ENVIRONMENT) $(PY) -m pytest -k 'not fork' $(COMBINATIONS) $(TSAN_TESTS); \
		$(TSAN_JUDGE)

stress-asan: build-asan $(VENV)/.nvmeio-fuzz
	$(ASAN_ENVIRONMENT) $(PY) -m pytest tests/stress --length short $(STRESS)

stress-tsan: build-tsan $(VENV)/.nvmeio-fuzz
	$(TSAN_ENVIRONMENT) $(PY) -m pytest tests/stress --length short $(STRESS); \
		$(TSAN_JUDGE)

# Which branches of the C library some test takes; assertions are left out.  What none
# takes is named in tests/uncovered.md.
coverage: build
	rm -rf build/c/coverage build/coverage
	CFLAGS='$(COVERAGE_FLAGS)' LDFLAGS=-lgcov \
		scripts/test-c $(PY) coverage
	NVMEIO_TEST_DIR=/dev/shm build/c/coverage/test_sweep 20
	build/c/coverage/test_file_faults
	CFLAGS='$(COVERAGE_FLAGS)' LDFLAGS=--coverage $(PY) setup.py -q build \
		--build-base build/coverage --build-lib build/coverage/lib
	PYTHONPATH=$(CURDIR)/build/coverage/lib $(PY) -m pytest $(COVERAGE_TESTS)
	$(PY) -m gcovr --root . --filter src/libnvmeio/ \
		--txt-metric branch \
		--fail-under-branch 90 --json build/coverage/branches.json --txt - \
		build/c/coverage build/coverage
	$(PY) scripts/check_uncovered.py build/coverage/branches.json

lint: build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PATH="$(VENV)/bin:$$PATH" cython-lint src/nvmeio
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	$(PY) bench/tables.py --check
	$(PY) bench/charts.py --check
	$(PY) -m mypy
	$(PY) -m mypy --follow-imports=silent tests/typing
	$(PY) -m pyright --pythonpath $(PY) --project tests/typing
	$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml \
		--allowlist tests/stubtest_allowlist.txt --ignore-unused-allowlist nvmeio

format: build
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

# Every warning is an error: a dead link, a public name that no page documents.
$(VENV)/.nvmeio-docs: $(INSTALLED) constraints.txt
	$(PY) -m pip install -q --constraint constraints.txt --no-build-isolation \
		--editable '.[docs]'
	touch $@

docs: build $(VENV)/.nvmeio-docs
	rm -rf build/docs docs/reference/api
	$(PY) -m sphinx -q -W --keep-going -d build/docs/doctrees -c docs . build/docs/html
	@echo build/docs/html/index.html

sdist: build
	rm -rf dist
	$(PY) -m build --sdist --outdir dist
	$(PY) scripts/check_sdist.py dist/nvmeio-*.tar.gz

# BENCH is for run.py, such as BENCH='--dir /mnt/nvme'.  What has failed is in the results,
# so they are shown all the same.
bench: build
	scripts/setup-bench $(PY)
	$(PY) bench/run.py $(BENCH) || status=1; $(PY) bench/charts.py || status=1; \
		$(PY) bench/tables.py || status=1; exit $${status:-0}

clean:
	rm -rf build dist src/nvmeio/lib src/nvmeio.egg-info $(VENV)/.nvmeio-*
	find src -name '*.so' -delete
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
