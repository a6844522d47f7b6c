# One-word tasks. `make help` lists them; `make check` is what CI runs.
#
# Everything runs from two venvs made on demand: .venv (the project, editable, at the versions of constraints.txt) and
# .venv-proto (the stub generator). Any of the variables below can be set on the command line or in the environment.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTO_VENV := .venv-proto
INSTALLED := $(VENV)/.installed
PROTO_INSTALLED := $(PROTO_VENV)/.installed
PIP_INSTALL := -m pip --disable-pip-version-check --quiet install
# The core compiled by mypyc, and what makes Python find it before the sources.
COMPILED := build/compiled
WITH_COMPILED := PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/$(COMPILED):$(CURDIR):$(CURDIR)/proto:$(CURDIR)/client" KVPLANE_CORE=compiled
# More for pytest: make test PYTEST_ARGS="-k scheduler -x"
PYTEST_ARGS ?=
# Two workers, a file's tests on one; tests/conftest.py says what begins. WORKERS=0: none, as debuggers like it.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Where `kvplane model pull` keeps weights.
export KVPLANE_CACHE ?= $(HOME)/.cache/kvplane
# Threads that wait without spinning: on a shared machine the default costs several times the compute.
export OMP_NUM_THREADS ?= 2
export OMP_WAIT_POLICY ?= PASSIVE
# Public request traces, when a folder of them lies beside the checkout; tests that replay them skip otherwise.
ifneq ($(wildcard ../shared/traces),)
export KVPLANE_TRACES ?= $(abspath ../shared/traces)
endif

.PHONY: help
help: ## list the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(INSTALLED) ## start the services, stream an answer, show its blocks and the prefix-cache hit of a second run
	PATH="$(CURDIR)/$(BIN):$$PATH" deploy/demo.sh

.PHONY: test
test: $(INSTALLED) ## run the tests, those on real weights (SmolLM2, fetched once) included
	@model=$${KVPLANE_TEST_MODEL:-$$($(BIN)/kvplane model pull smollm2)}; \
	KVPLANE_TEST_MODEL="$$model" $(PYTEST) -m "not soak" $(PYTEST_ARGS)

# Of the tests on real processes those that take the compiled core through caching, preemption, swap, several KV groups and
# a restart after SIGKILL. Each makes sure that the manager it started runs the compiled core (tests/e2e/cluster.py).
REAL_PROCESSES := \
  "tests/e2e/test_cluster_equivalence.py::test_load_on_a_small_pool_gives_the_oracles_tokens[True-True-fair]" \
  tests/e2e/test_cluster_equivalence.py::test_load_that_is_swapped_gives_the_oracles_tokens \
  tests/e2e/test_kv_groups.py::test_groups_a_killed_executor_and_a_killed_manager_change_no_token

# The simulation's files take longest, so they begin: of two workers none is left alone with one.
.PHONY: test-compiled
test-compiled: $(COMPILED)/.built ## run the manager's tests, the simulation and real processes on the core compiled by mypyc
	$(WITH_COMPILED) $(PYTEST) -o pythonpath= \
	  -m "not soak and not patches_core" $(PYTEST_ARGS) tests/simulation tests/unit/core tests/unit/replay \
	  tests/unit/manager tests/integration/manager $(REAL_PROCESSES)

.PHONY: soak
soak: $(INSTALLED) ## run the tests that take minutes, those on real weights included
	@model=$${KVPLANE_TEST_MODEL:-$$($(BIN)/kvplane model pull smollm2)}; \
	KVPLANE_TEST_MODEL="$$model" $(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

# How long, and the first seed; without one, a random one.
SECONDS ?= 60
SEED ?=
# What lives are of, as a failure names it; without it each seed draws that, too.
LIFE ?=
.PHONY: simulate
simulate: $(INSTALLED) ## run the fault simulation for SECONDS=60 from SEED= on; a failure prints its shortest schedule
	$(BIN)/python -m tests.simulation.simulate --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(LIFE)

# The core compiles on one processor meanwhile.
.PHONY: check
check: $(INSTALLED) ## lint, contract, demo and tests: what CI runs
	@set -m; $(MAKE) $(COMPILED)/.built & compiling=$$!; set +m; \
	trap 'kill -- -$$compiling 2>/dev/null || true' EXIT; \
	$(MAKE) lint proto-check demo; \
	wait $$compiling; \
	trap - EXIT
	@$(MAKE) test-compiled test

.PHONY: lint
lint: $(INSTALLED) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(INSTALLED) ## rewrite the sources as ruff and buf want them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

.PHONY: proto
proto: $(PROTO_INSTALLED) ## regenerate the stubs from the .proto files
	PYTHON=$(PROTO_VENV)/bin/python proto/generate.sh

.PHONY: proto-check
proto-check: $(INSTALLED) $(PROTO_INSTALLED) ## lint the contract, find breaking changes and stale stubs
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against proto/buf-image.binpb
	PYTHON=$(PROTO_VENV)/bin/python proto/generate.sh --check

.PHONY: proto-baseline
proto-baseline: $(INSTALLED) ## accept the contract as it is: what breaking changes are measured against from now on
	$(BIN)/buf build --exclude-source-info -o proto/buf-image.binpb

.PHONY: bench
bench: $(COMPILED)/.built ## measure the control plane (compiled), the split and, on SmolLM2, serving
	@model=$${KVPLANE_TEST_MODEL:-$$($(BIN)/kvplane model pull smollm2)}; \
	KVPLANE_TEST_MODEL="$$model" $(WITH_COMPILED) $(BIN)/python -m benchmarks

.PHONY: wheel
wheel: $(INSTALLED) ## build the wheel with the compiled core into dist/ (needs a C compiler)
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(BIN)/python -m pip --disable-pip-version-check --quiet wheel --no-deps -w dist .

.PHONY: test-compose
test-compose: $(INSTALLED) ## build the images, bring the compose stack up, generate, restart the executor; exit 77: no engine
	PATH="$(CURDIR)/$(BIN):$$PATH" deploy/test_compose.sh

.PHONY: constraints
constraints: ## write constraints.txt anew from the newest releases that pyproject.toml admits (torch and triton stay)
	@$(require-python)
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PYTHON) -m venv "$$fresh"; \
	grep -E '^(torch|triton)==' constraints.txt >"$$fresh/torch.txt"; \
	"$$fresh/bin/python" $(PIP_INSTALL) -r "$$fresh/torch.txt"; \
	"$$fresh/bin/python" $(PIP_INSTALL) -c "$$fresh/torch.txt" -e '.[dev]'; \
	grep '^#' constraints.txt >"$$fresh/new.txt"; \
	"$$fresh/bin/python" -m pip freeze --exclude-editable | sed 's/+cpu$$//' \
	  | grep -v -E '^(nvidia-.*-cu[0-9]+|nvidia-cu.*|cuda-.*)==' >>"$$fresh/new.txt"; \
	cp "$$fresh/new.txt" constraints.txt

.PHONY: clean
clean: ## remove the venvs, caches and build results (fetched weights stay)
	rm -rf $(VENV) $(PROTO_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# torch goes first and alone: so pip takes the build it is offered for this version (a CPU build where one is configured,
# such as a find-links folder or an extra index; else its index's default), and what follows finds it installed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(require-python)
	$(PYTHON) -m venv $(VENV)
	@echo '*' > $(VENV)/.gitignore
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt torch
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(PROTO_INSTALLED): proto/requirements.txt
	@$(require-python)
	$(PYTHON) -m venv $(PROTO_VENV)
	@echo '*' > $(PROTO_VENV)/.gitignore
	$(PROTO_VENV)/bin/python $(PIP_INSTALL) -r proto/requirements.txt
	@touch $@

# The manager's package as a compiled wheel has it, aside: in the tree, extension modules would shadow edited sources.
$(COMPILED)/.built: $(INSTALLED) hatch_build.py $(shell find kvmanager_service -name '*.py')
	rm -rf $(COMPILED)
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(BIN)/python -m pip --disable-pip-version-check --quiet \
	  wheel --no-deps -w $(COMPILED)/wheel .
	$(BIN)/python $(PIP_INSTALL) --no-deps --target $(COMPILED)/all $(COMPILED)/wheel/*.whl
	mv $(COMPILED)/all/kvmanager_service $(COMPILED)/all/*__mypyc* $(COMPILED)
	rm -rf $(COMPILED)/all $(COMPILED)/wheel
	@touch $@

define require-python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "KVPlane needs Python 3.11 or newer, with venv. '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true)" >&2; \
	echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
endef
