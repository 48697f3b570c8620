# `make` alone lists the targets. Everything lives in .venv; nothing is installed outside it but redis-server, for `make test`.

# The first interpreter that is new enough; make PYTHON=python3.12 ... picks another.
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# An extra package index to take torch from, such as the one PyTorch keeps for builds without CUDA.
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt
# The extra with UCX for the CUDA that torch was built for, asked for when torch is installed.
UCX = $(shell $(BIN)/python -c 'import torch; print("ucx-cu13" if (torch.version.cuda or "").startswith("13.") else "ucx")')
CODE := kvrelay kv_connector router prefill_node decode_node kernels/paged_kernels demo bench tests
KERNEL_SOURCES := $(shell find kernels -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name 'CMakeLists.txt' \))
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.DEFAULT_GOAL := help
.PHONY: help demo test checks lint typecheck proto-check oldest-triton pytest kernel-tests other-tests sanitize chaos simulate proto bench redis-server upgrade clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed  ## Serve the demo model through real processes and ask it a few things
	$(BIN)/python -m demo.run

# Two jobs, because most tests often wait: those of the kernels, which compute all the time, run with the checks beside the others.
test: $(VENV)/installed-dev  ## Everything needed to trust a change
	$(MAKE) --jobs=2 other-tests checks kernel-tests

checks: lint typecheck proto-check oldest-triton  ## Ruff, mypy --strict, protobuf drift and the oldest Triton, without the tests

lint: $(VENV)/installed-dev  ## Ruff: rules and format
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

typecheck: $(VENV)/installed-dev  ## mypy --strict over code and tests
	$(BIN)/mypy --strict $(CODE)

# One thread for each process: tests run several at a time, and threads that wait for each other's cores cost minutes. Dozens of
# processes import us, so what the first one compiles is kept whatever the caller prefers.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 GRPC_VERBOSITY=NONE $(BIN)/python -m pytest

pytest: $(VENV)/installed-dev redis-server  ## The tests; make pytest ARGS='tests/engine -k pool' runs some
	$(PYTEST) $(ARGS)

kernel-tests: $(VENV)/installed-dev
	$(PYTEST) tests/kernels

other-tests: $(VENV)/installed-dev redis-server
	$(PYTEST) --ignore=tests/kernels

# The kernels as GCC's sanitizers see them, in environments that take everything else from .venv. Nothing is captured, because a finding
# ends the process. Triton's tests use none of these kernels.
SANITIZED := build/sanitized
PYTEST_SANITIZED = OMP_NUM_THREADS=1 PYTHONMALLOC=malloc LD_PRELOAD="$$($(CXX) -print-file-name=$(2).so) $$($(CXX) -print-file-name=libstdc++.so)" \
	$(SANITIZED)/$(1)/bin/python -m pytest --capture=no --override-ini=timeout=1800

sanitize: $(SANITIZED)/address/installed $(SANITIZED)/thread/installed  ## The kernels under sanitizers of memory, undefined behaviour and threads
	ASAN_OPTIONS=detect_leaks=0 $(call PYTEST_SANITIZED,address,libasan) tests/kernels --ignore-glob='*triton*'
	TSAN_OPTIONS=halt_on_error=1,die_after_fork=0 $(call PYTEST_SANITIZED,thread,libtsan) tests/kernels/test_threads.py

$(SANITIZED)/address/installed: SANITIZERS := address,undefined
$(SANITIZED)/thread/installed: SANITIZERS := thread
$(SANITIZED)/%/installed: $(VENV)/installed-dev
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(ls -d $(@D)/lib/python*/site-packages)/borrowed.pth
	$(@D)/bin/python -m pip install --no-deps --config-settings=build-dir=$(@D)/cmake --config-settings=install.strip=false \
		--config-settings=cmake.define.PAGED_EMULATE=ON --config-settings=cmake.define.PAGED_SANITIZE=$(SANITIZERS) .
	@touch $@

chaos: $(VENV)/installed-dev redis-server  ## Minutes of killed, stopped and cut-off nodes under load; ARGS=--help explains
	GRPC_VERBOSITY=NONE $(BIN)/python -m tests.chaos $(ARGS)

simulate: $(VENV)/installed-dev  ## A cluster under virtual time and injected failures, seed by seed; ARGS='--seed 7 --trace' replays one
	$(BIN)/python -m tests.simulation $(or $(ARGS),--seeds 0:1000)

bench: $(VENV)/installed-dev  ## The cluster against transformers' generate; ARGS=--help explains
	$(BIN)/python -m bench.serve_vs_generate $(ARGS)

# Generated code is committed. It is made by an old protoc on purpose: protobuf 5.29 to 7 can load its output.
define GENERATE
PATH="$(CURDIR)/$(VENV)/proto/bin:$$PATH" python -m grpc_tools.protoc -I proto --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=$(1) --mypy_grpc_out=$(1) proto/kvrelay/v1/*.proto
endef

proto: $(VENV)/proto/installed  ## Generate kvrelay/v1 from proto/
	$(call GENERATE,.)

proto-check: $(VENV)/proto/installed  ## Is the committed generated code that of proto/?
	@rm -rf build/proto && mkdir -p build/proto
	$(call GENERATE,build/proto)
	@diff -r --brief --exclude=__init__.py --exclude=__pycache__ build/proto/kvrelay/v1 kvrelay/v1 \
		|| { echo "kvrelay/v1 is not what proto/ generates: run 'make proto' and commit the result"; exit 1; }

# What torch 2.11 for CUDA brings; the tests compile with the newest that is supported.
oldest-triton: $(VENV)/oldest-triton/installed  ## Do the GPU kernels compile with the oldest Triton that is supported, too?
ifeq ($(shell uname -s),Linux)
	PYTHONPATH=$(VENV)/oldest-triton $(BIN)/python -m pytest tests/kernels/test_triton_compiled.py
endif

redis-server:
	@command -v redis-server >/dev/null || { echo "installing redis-server, which some tests start"; \
		if command -v apt-get >/dev/null; then $(SUDO) apt-get update && $(SUDO) apt-get install --yes --no-install-recommends redis-server; \
		elif command -v dnf >/dev/null; then $(SUDO) dnf install --assumeyes redis; \
		elif command -v brew >/dev/null; then brew install redis; \
		else echo "no known package manager: install redis-server yourself"; exit 1; fi; }

# Torch stays what it is; what belongs to a GPU is bounded in pyproject.toml, because it follows torch and the driver.
upgrade: $(VENV)/installed-dev  ## Install the newest dependencies but torch, and pin them in constraints.txt; then run make test
	grep -E '^(#|torch=)' constraints.txt > $(VENV)/pinned
	$(BIN)/python -m pip install --constraint $(VENV)/pinned --upgrade --upgrade-strategy eager --editable '.[engine,redis,$(UCX),dev]'
	$(BIN)/python -m pip freeze --exclude-editable > $(VENV)/frozen
	grep -vE '^(torch|triton|cuda|nvidia|rmm|rapids|librmm|libucx)' $(VENV)/frozen | sort --ignore-case >> $(VENV)/pinned
	mv $(VENV)/pinned constraints.txt

clean:  ## Remove everything that make made
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@[ -n "$(PYTHON)" ] || { echo "kvrelay needs Python 3.11 or newer: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Torch first and alone, so that only it is looked for in the extra index.
$(VENV)/torch: constraints.txt | $(VENV)/created
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@touch $@

# Editable: Python sources are used where they lie, so only the kernels and the dependencies make it stale.
$(VENV)/installed: pyproject.toml constraints.txt $(KERNEL_SOURCES) $(VENV)/torch
	$(PIP) --editable '.[engine,redis,bench]'
	@touch $@

# It is all that `installed` is: in a fresh clone the kernels are built once. Those that this processor cannot run are emulated.
$(VENV)/installed-dev: pyproject.toml constraints.txt $(KERNEL_SOURCES) $(VENV)/torch
	$(PIP) --config-settings=cmake.define.PAGED_EMULATE=ON --editable '.[engine,redis,$(UCX),dev]'
	@touch $(VENV)/installed $@

$(VENV)/oldest-triton/installed: $(VENV)/installed-dev
ifeq ($(shell uname -s),Linux)
	$(BIN)/python -m pip install --no-deps --target $(@D) --upgrade triton==3.6.0
endif
	@mkdir -p $(@D) && touch $@

$(VENV)/proto/installed: | $(VENV)/created
	$(BIN)/python -m venv $(VENV)/proto
	$(VENV)/proto/bin/python -m pip install grpcio-tools==1.71.2 mypy-protobuf==3.6.0 'setuptools<80'
	@touch $@
