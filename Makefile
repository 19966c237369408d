# Thin on purpose: the work is in the `thaw` command line (`.venv/bin/thaw --help`).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && { echo $$p; break; }; done)
# An extra package index for torch alone, e.g. https://download.pytorch.org/whl/cpu for the small CPU-only build.
TORCH_INDEX ?=
# The installer: pip, or uv, which takes a fifth of the CPU time and ignores the configuration of pip.
INSTALLER ?= pip
# Options of both installs, e.g. --no-compile where tests import what they need.
PIP_OPTIONS ?=
# Test processes at a time. On two virtual cores three left 21 % of the CPU time idle and took 26:10 and 2,071 CPU seconds
# (`make test-cpu` shows them); four left 10 % and took 25:37 and 2,434, and tests waited longer for a core.
WORKERS ?= 3
# Of these, how many run the tests of whole meshes first, each of which computes.
MESH_WORKERS ?= 2
# What `make test-cpu` runs.
TESTS ?= tests/unit
# How long `make soak` takes.
HOURS ?= 2
REAL := tests/integration/engines_real
# Modules whose tests share no engine. They run beside those that share a vLLM.
OWN_ENGINES := $(addprefix $(REAL)/test_,cannot_generate.py moving.py spare.py tensor_parallel.py)
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
INSTALL_pip := $(BIN)/pip install --disable-pip-version-check
INSTALL_uv := $(BIN)/uv pip install --python $(BIN)/python
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

# Python keeps what it has compiled, also where a container's environment says otherwise: without it each of
# pytest's processes compiles all tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help console up down test test-own-engines test-shared-engines test-cpu test-long lint lint-types lint-rest docs bench chaos soak gpu clean install engines kubernetes-tools peers clients lock

help: ## Show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

up: $(STAMP) ## Install, start the mesh in the background, and show it with three demo models
	@$(BIN)/thaw up --demo --detach

down: ## Stop the mesh
	@$(BIN)/thaw down

# `make -n` runs each line that names $(MAKE), so that line of `test` must not: it runs pytest, too.
SUBMAKE := $(MAKE)

# Real engines after all others: each computes with all cores, and starves what runs beside it.
test: $(STAMP) ## Run the whole test suite
	@status=0; \
	THAW_TEST_MESH_WORKERS=$(MESH_WORKERS) $(BIN)/pytest -n $(WORKERS) --dist loadscope --ignore $(REAL) || status=$$?; \
	$(SUBMAKE) --no-print-directory -k -j 2 --output-sync test-own-engines test-shared-engines || status=$$?; \
	exit $$status

test-own-engines: $(STAMP)
	@$(BIN)/pytest $(OWN_ENGINES)

test-shared-engines: $(STAMP)
	@$(BIN)/pytest $(REAL) $(addprefix --ignore ,$(OWN_ENGINES))

test-cpu: $(STAMP) ## Run the tests of TESTS, and rank folders, modules and tests by CPU time (needs root)
	@$(BIN)/pytest -p tests.support.cpu_by_test $(TESTS)

# Modules whose tests have smaller sizes in `make test` (tests/support/sizes.py), and that no other line of `test-long` names.
RESIZED := $(addprefix tests/chaos/test_,full.py kills.py moving.py moving_faults.py replicas.py servers.py) \
	$(addprefix tests/e2e/test_,chosen_stages.py consolidation.py faults.py late_binding.py moving_between_groups.py peer_copy.py shared.py) \
	$(addprefix tests/integration/engine/test_kv_,groups.py group_process.py process.py to_groups.py to_group_process.py transfer.py) \
	$(addprefix tests/unit/scheduler/placement/test_,key_shares.py many_devices.py)

test-long: export THAW_TEST_FULL_SIZES = 1
test-long: $(STAMP) ## Run the tests that repeat many times: 1,000 moves, 200 swaps, 20 leaders killed (hours)
	@THAW_TEST_MIGRATIONS=1000 $(BIN)/pytest tests/e2e/test_migration.py
	@THAW_TEST_STORM_S=60 THAW_TEST_STORM_STREAMS=30 $(BIN)/pytest tests/chaos/test_failover.py
	@THAW_TEST_CHAOS_KILLS=40 $(BIN)/pytest tests/chaos/test_campaign.py
	@THAW_TEST_EXECUTOR_KILLS=200 $(BIN)/pytest tests/chaos/test_executor_kills.py
	@THAW_TEST_SWAPS=200 THAW_TEST_MIGRATIONS=200 THAW_TEST_CHANGES=100 $(BIN)/pytest $(REAL)/test_suspend.py $(REAL)/test_moving.py $(REAL)/test_plugin.py
	@$(BIN)/pytest $(RESIZED)
	@THAW_TEST_FULL_BODIES=1 $(BIN)/pytest tests/integration/gateway/test_large_bodies.py tests/integration/gateway/test_large_translated.py
	@$(BIN)/pytest -m long tests
	@THAW_TEST_RANDOM=1 THAW_TEST_EXAMPLES=100 $(BIN)/pytest -n $(WORKERS) -m hypothesis tests/unit tests/contract

lint: $(STAMP) ## Check style, words, types and imports
	@$(MAKE) --no-print-directory -j 2 --output-sync lint-types lint-rest

lint-types: $(STAMP)
	@$(BIN)/mypy thaw services shared weights simulator bench tests docs

lint-rest: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python docs/check_words.py
	@$(BIN)/lint-imports

docs: $(STAMP) ## Build the documentation as a site in build/docs; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "open build/docs/index.html"

console: ## Build the console at /ui from console/ into the gateway's package data (needs node and npm)
	@cd console && npm ci --ignore-scripts --no-audit --no-fund --silent && npm run --silent build && du -bc ../services/gateway/http/console/static/*.br | tail -n 1

bench: $(STAMP) ## Print the figures of docs/performance.md that need no other engine (an hour on two cores)
	@for b in cold_path warm_path scheduler scheduler_path loader migration convert; do $(BIN)/python -m bench.$$b || exit 1; done

chaos: $(STAMP) ## Kill and stop 500 processes of a mesh under load, and print what its clients saw (half an hour on two cores)
	@$(BIN)/python -m bench.chaos --kills 500 --seed 1

gpu: $(STAMP) ## Test and measure what only an NVIDIA GPU can show: loading, suspending, hot swap
	@$(BIN)/python -m bench.gpu

soak: $(STAMP) ## Find what grows in a mesh that serves for two hours (HOURS=N for longer)
	@$(BIN)/python -m bench.soak --hours $(HOURS) --compare 10

install: $(STAMP) ## Make .venv

# torch first: what depends on it then takes it as it is. The stamp makes the second time instant.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Thaw needs Python 3.11 or later: install it, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module: install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(filter uv,$(INSTALLER)),$(INSTALL_pip) --quiet -c constraints.txt uv)
	$(INSTALL_$(INSTALLER)) $(PIP_OPTIONS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt "$(TORCH)"
	$(INSTALL_$(INSTALLER)) $(PIP_OPTIONS) -c constraints.txt -e '.[node,local,dev]'
	@touch $(STAMP)

engines: $(STAMP) ## Install real vLLM and llama.cpp for their tests, once, into the cache directory (some six minutes on two cores)
	@$(BIN)/python -m tests.support.real_engines

kubernetes-tools: $(STAMP) ## Install helm and kubectl for the tests of deploy/, once, into the cache directory
	@$(BIN)/python -m tests.support.kubernetes_tools

peers: $(STAMP) ## Install the loaders that `python -m bench.loader` compares with, once, into the cache directory, and print their Python
	@$(BIN)/python -m bench.peers

clients: $(STAMP) ## Try client libraries (LangChain, LiteLLM and others) with a demo model; installs them once into the cache directory
	@$(BIN)/python -m bench.clients

lock: $(STAMP) ## Lock what the images install, after a change of pyproject.toml or constraints.txt (asks the package index)
	@$(BIN)/python compose/lock.py

clean: ## Remove .venv, build and caches (the mesh's state under ~/.thaw stays)
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
