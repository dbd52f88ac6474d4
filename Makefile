# On Debian and Ubuntu, each target installs what it needs.  PYTHON creates the virtual
# environment, in the folder VENV.  CONTRIBUTING.md describes all targets.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -q --constraint constraints.txt
INSTALLED := $(VENV)/.nvmeio-installed
# The stamps of what tests, linters and the documentation need beside.
TESTS_INSTALLED := $(VENV)/.nvmeio-extra-test
DEV_INSTALLED := $(VENV)/.nvmeio-extra-dev
DOCS_INSTALLED := $(VENV)/.nvmeio-extra-docs
# How many processes share the Python tests.
JOBS ?= 2

# ccache is found before the compilers, if it is installed, now or by setup-machine.
export PATH := /usr/lib/ccache:/usr/lib64/ccache:$(PATH)

C_FILES := $(shell find include src/libnvmeio tests bench -name '*.[ch]')

ASAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	-fno-omit-frame-pointer -g
# The leaks that ASan sees when Python exits are Python's own.  Unless libstdc++ is preloaded,
# torch's exceptions end the process.
ASAN_ENVIRONMENT = ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(CURDIR)/build/asan/lib \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)"

# Python itself is not instrumented, but TSan sees its locks.  It does not see how libgomp
# waits, so OpenMP is left out.  Reports go to files, because pytest captures the output.  If
# any file is left at the end, the run fails, even if only a child wrote it.
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

.PHONY: help demo test build installed test-python test-c test-c-asan test-c-tsan test-neon test-pythons test-free-threaded
.PHONY: check-all mutants
.PHONY: docs stress-short stress stress-long replay fuzz test-deepspeed test-models
.PHONY: test-models-short test-formats test-distributed lint format sdist bench
.PHONY: wheels test-wheels release-check asan tsan stress-asan stress-tsan build-asan build-tsan coverage clean

# `make` alone lists the targets whose line has a description.
help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 18
	@echo 'CONTRIBUTING.md describes the others, and variables that select tests.'

demo: build ## show what nvmeio does (the first time, this installs torch and builds)
	@$(PY) examples/demo.py

test: test-c test-python ## run the tests of the C library and of the package

$(VENV)/.nvmeio-tools: constraints.txt scripts/setup-machine
	scripts/setup-machine $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade setuptools Cython
	touch $@

# Compile while torch is being installed, whose wheel is the largest by far.  It is pinned, so
# that no other requirement replaces it later.  Python compiles the modules that it imports.
# The last command installs the version, which is in base.h, and links to the tree.
$(INSTALLED): $(VENV)/.nvmeio-tools pyproject.toml setup.py include/nvmeio/base.h \
		src/nvmeio-follow.pth
	$(PIP) --no-compile torch numpy crc32c & \
		$(PY) setup.py -q build_ext --inplace; built=$$?; wait $$! && exit $$built
	$(PIP) --no-build-isolation --editable '.[torch]'
	touch $@

# The packages of an extra.  nvmeio itself is not installed again.
$(VENV)/.nvmeio-extra-%: $(INSTALLED) scripts/setup-machine
	$(if $(filter test,$*),scripts/setup-machine $(PY) --tests)
	flock $(VENV) $(PIP) 'nvmeio[$*]'
	touch $@

# All that the steps of .ci/run share.
installed: $(TESTS_INSTALLED) $(DEV_INSTALLED) $(DOCS_INSTALLED) $(VENV)/.nvmeio-fuzz

build: $(INSTALLED) ## compile what has changed, and what depends on it
	$(PY) setup.py -q build_ext --inplace

# TESTS selects tests, which run in one process: TESTS='tests/test_file.py -k short'.  Without
# bytecode, each process, and each of a thousand children, compiles all modules again.
test-python: build $(TESTS_INSTALLED) ## run the tests of the package, or some: TESTS=tests/test_file.py
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest $(or $(TESTS),-n $(JOBS)) $(COMBINATIONS)

# C_TESTS selects tests, such as C_TESTS=test_file.
test-c: $(TESTS_INSTALLED) ## run the tests of the C library, or some: C_TESTS=test_file
	scripts/test-c $(PY) plain $(C_TESTS)

test-c-asan: $(TESTS_INSTALLED)
	scripts/test-c $(PY) asan $(C_TESTS)

test-c-tsan: $(TESTS_INSTALLED)
	scripts/test-c $(PY) tsan $(C_TESTS)

# Except the hours of stress-long and of fuzz with LENGTH=long.
check-all: COMBINATIONS := --all-combinations
check-all: ## run every check in full, for hours
check-all: test test-c-asan test-c-tsan test-deepspeed test-models test-formats test-distributed \
	test-neon lint docs sdist asan tsan stress stress-asan stress-tsan test-pythons test-free-threaded \
	coverage mutants

# Check that the tests notice the fault of each patch of tests/mutants.  MUTANTS is passed to
# the script, such as MUTANTS='file-*'.
mutants: build $(VENV)/.nvmeio-fuzz
	$(PY) scripts/mutants.py $(MUTANTS)

# The copy kernels of arm64, in an emulator.
ARM64_CC := aarch64-linux-gnu-gcc
test-neon:
	{ command -v $(ARM64_CC) && command -v qemu-aarch64; } || { apt-get update -q && \
		apt-get install -qy gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user; }
	mkdir -p build/c
	$(ARM64_CC) -static -std=gnu11 -D_GNU_SOURCE= -O2 -Wall -Wextra -Werror -Iinclude \
		-Isrc/libnvmeio tests/c/test_copy.c src/libnvmeio/copy*.c -o build/c/test_neon
	qemu-aarch64 build/c/test_neon

# STRESS is passed to pytest, such as STRESS='-k model' or STRESS='--seed 7'.
stress-short: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest -n $(JOBS) tests/stress --length short $(STRESS)

stress: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest -n $(JOBS) tests/stress --length full $(STRESS)

stress-long: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest tests/stress --length long $(STRESS)

# A failed case prints its seed: SEED='test_name[parameter]:12345'.
replay: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest tests/stress --replay '$(SEED)'

# LENGTH=long runs for hours; STRESS='-k npy' selects one target.
LENGTH ?= full
fuzz: $(VENV)/.nvmeio-fuzz
	$(PY) -m pytest tests/stress/test_fuzz.py --length $(LENGTH) $(STRESS)

# If something cannot be installed, each run tries again and reports it.
$(VENV)/.nvmeio-fuzz: scripts/setup-fuzz $(TESTS_INSTALLED) | build
	if scripts/setup-fuzz $(PY); then touch $@; fi

# PYTHONS names interpreters, and TESTS selects tests: PYTHONS=/usr/bin/python3.12.
test-pythons: build $(TESTS_INSTALLED)
	JOBS=$(JOBS) $(PY) scripts/test_pythons.py $(PYTHONS) -- $(COMBINATIONS) $(TESTS)

# A Python without the GIL, which is built the first time.
FREE_THREADED := build/python3.13t
test-free-threaded: build $(TESTS_INSTALLED)
	scripts/setup-free-threaded $(FREE_THREADED)
	JOBS=$(JOBS) $(PY) scripts/test_pythons.py $(FREE_THREADED)/bin/python3.13t -- \
		$(COMBINATIONS) $(TESTS)

test-deepspeed: build $(TESTS_INSTALLED)
	scripts/test-deepspeed $(PY) -n $(JOBS) $(COMBINATIONS)

# MODELS is passed to pytest, such as MODELS='-k diffusers'.
test-models: build $(TESTS_INSTALLED)
	scripts/test-models $(PY) $(MODELS) $(COMBINATIONS)

# transformers has the most ways to load, and the others use functions of huggingface_hub.
test-models-short: build $(TESTS_INSTALLED)
	scripts/test-models $(PY) -k '(variable and (transformers or hub)) or disk_offload'

# FORMATS is passed to pytest, such as FORMATS='-k megatron'.
test-formats: build $(TESTS_INSTALLED)
	scripts/test-formats $(PY) $(FORMATS) $(COMBINATIONS)

# This takes some minutes, because every test starts ranks of torch.
test-distributed: build $(TESTS_INSTALLED)
	$(PY) -m pytest $(or $(DISTRIBUTED),-n $(JOBS)) tests/distributed

build-asan: build $(TESTS_INSTALLED)
	CFLAGS='$(ASAN_FLAGS)' $(PY) setup.py -q build \
		--build-base build/asan --build-lib build/asan/lib

build-tsan: build $(TESTS_INSTALLED)
	CFLAGS='-fsanitize=thread -g -fno-omit-frame-pointer' NVMEIO_WITH_OPENMP=no \
		$(PY) setup.py -q build --build-base build/tsan --build-lib build/tsan/lib
	rm -f $(TSAN_REPORT).*

# In one process each, because a sanitizer reports some findings by the exit status.
asan: build-asan
	$(ASAN_ENVIRONMENT) $(PY) -m pytest -m 'not packaging' $(COMBINATIONS)

# Without forks, because TSan starts no threads in a child of a process that has threads.
tsan: build-tsan
	$(TSAN_ENVIRONMENT) $(PY) -m pytest -k 'not fork' $(COMBINATIONS) $(TSAN_TESTS); \
		$(TSAN_JUDGE)

stress-asan: build-asan $(VENV)/.nvmeio-fuzz
	$(ASAN_ENVIRONMENT) $(PY) -m pytest tests/stress --length short $(STRESS)

stress-tsan: build-tsan $(VENV)/.nvmeio-fuzz
	$(TSAN_ENVIRONMENT) $(PY) -m pytest tests/stress --length short $(STRESS); \
		$(TSAN_JUDGE)

# Check which branches of the C library the tests take, without assertions.
# tests/uncovered.md lists those that no test takes.
coverage: build $(TESTS_INSTALLED) $(DEV_INSTALLED)
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

lint: build $(DEV_INSTALLED) ## run linters and type checkers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PATH="$(VENV)/bin:$$PATH" cython-lint src/nvmeio
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES) || { echo 'make format mends this'; exit 1; }
	$(PY) bench/tables.py --check
	$(PY) bench/charts.py --check
	$(PY) -m mypy
	$(PY) -m mypy --config-file tests/typing/mypy.ini
	$(PY) -m pyright --pythonpath $(PY) --project tests/typing
	$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml \
		--allowlist tests/stubtest_allowlist.txt --ignore-unused-allowlist nvmeio

format: build $(DEV_INSTALLED) ## fix what linters can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

# Every warning is an error, such as a dead link or a public name that no page documents.
docs: build $(DOCS_INSTALLED) ## build the documentation as HTML
	rm -rf build/docs docs/reference/api
	$(PY) -m sphinx -q -W --keep-going -d build/docs/doctrees -c docs . build/docs/html
	@echo build/docs/html/index.html

sdist: build $(DEV_INSTALLED)
	rm -f dist/*.tar.gz
	$(PY) -m build --sdist --outdir dist
	$(PY) scripts/check_sdist.py dist/nvmeio-*.tar.gz

# WHEELS selects versions of CPython, such as WHEELS='3.11 3.12'.
wheels: $(VENV)/.nvmeio-tools
	scripts/build-wheels $(PY) $(WHEELS)

# RELEASES selects systems, such as RELEASES='bookworm trixie'.  debootstrap makes each once.
test-wheels: $(TESTS_INSTALLED)
	scripts/setup-machine $(PY) debootstrap \
		$$(command -v qemu-aarch64-static >/dev/null || echo qemu-user-static)
	PYTHONPATH=tests $(PY) scripts/test_wheels.py $(RELEASES)

# CHECKS selects some, such as CHECKS='version tree'.
release-check: $(DEV_INSTALLED) $(TESTS_INSTALLED)
	PYTHONPATH=tests $(PY) scripts/release_check.py $(CHECKS)

# BENCH is passed to run.py, such as BENCH='--dir /mnt/nvme'.  The charts and tables are made
# even if a script fails, because the results say so.
bench: build ## measure for 10 minutes, and fill the tables and charts
	scripts/setup-bench $(PY)
	$(PY) bench/run.py $(BENCH) || status=1; $(PY) bench/charts.py || status=1; \
		$(PY) bench/tables.py || status=1; exit $${status:-0}

clean:
	rm -rf build dist src/nvmeio/lib src/nvmeio.egg-info $(VENV)/.nvmeio-*
	find src -name '*.so' -delete
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
