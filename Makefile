# Two commands matter: `make serve` and `make test`. Everything they need beyond Python >= 3.11 (with
# headers), a C++ compiler and make is installed into .venv, .model and build/, which git ignores.

PYTHON ?= python3
MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
# Test files run at the same time; each may hold an engine of 2 to 5 GB.
JOBS ?= 2
OPS ?= 10000000
REQUESTS ?= 1000000
CALLS ?= 1000000
CONNECTOR ?= TagmaNixlConnector
PREFILL_ARGS ?=
DECODE_ARGS ?=
OUT ?= build/bench-smoke
ACCEPT ?=
VERSION ?=
SEED ?= 1
CASES ?= 200
MINUTES ?= 60
BASE ?= HEAD~1

BIN := .venv/bin
SETUP := $(PYTHON) tools/prepare.py
# Tests never ask a model hub for anything.
TEST_ENV := TAGMA_VLLM033=$(CURDIR)/build/vllm-0.33 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
CXX_FILES := $(wildcard csrc/*/*.hpp csrc/*/*.cpp)

# A value as one word of the shell, whatever quotes it contains.
quote = '$(subst ','\'',$(1))'

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help serve pd test test-fast lint format cpp-test fuzz soak soak-transfer load attention-sweep nightly upstream drift wheel pytest env doctor gpu-check bench-smoke bench-commits clean distclean python

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: MODEL=folder-or-hub-id PORT=8000 HOST=127.0.0.1 ARGS=\"vllm flags\" PYTHON=python3.12"

serve: python ## Set everything up and serve a model on the tagma backend
	@exec $(PYTHON) tools/serve.py --model=$(call quote,$(MODEL)) --host=$(call quote,$(HOST)) \
	  --port=$(call quote,$(PORT)) --args=$(call quote,$(ARGS))

pd: python ## Serve prefill and decode on two servers behind a small proxy: PORT=8000 CONNECTOR=NixlConnector
	@exec $(PYTHON) tools/pd.py --model=$(call quote,$(MODEL)) --host=$(call quote,$(HOST)) \
	  --port=$(call quote,$(PORT)) --connector=$(call quote,$(CONNECTOR)) --args=$(call quote,$(ARGS)) \
	  --prefill-args=$(call quote,$(PREFILL_ARGS)) --decode-args=$(call quote,$(DECODE_ARGS))

test: lint docs cpp-test wheel pytest ## Everything that CI runs, cheapest first

lint: tools ## ruff, mypy, clang-format
	@$(BIN)/ruff check src tests tools docs
	@$(BIN)/ruff format --check src tests tools docs
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: tools ## Rewrite the sources as lint wants them
	@$(BIN)/ruff check --fix src tests tools docs
	@$(BIN)/ruff format src tests tools docs
	@$(BIN)/clang-format -i $(CXX_FILES)

cpp-test: tools ## The C++ tests under ASan and UBSan
	@PATH="$(CURDIR)/$(BIN):$$PATH" && mkdir -p build/logs \
	  && $(BIN)/cmake -S . -B build/asan -G Ninja -DTAGMA_BUILD_TESTS=ON -DTAGMA_SANITIZE=ON > build/logs/cmake-asan.log \
	  && $(BIN)/cmake --build build/asan \
	  && $(BIN)/ctest --test-dir build/asan --output-on-failure --parallel $(JOBS)

build/release/pool_%: tools
	@PATH="$(CURDIR)/$(BIN):$$PATH" && mkdir -p build/logs \
	  && $(BIN)/cmake -S . -B build/release -G Ninja -DTAGMA_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Release > build/logs/cmake-release.log \
	  && $(BIN)/cmake --build build/release --target pool_$*

fuzz: cpp-test build/release/pool_fuzz ## The pool's fuzzer at length, a tenth of it under ASan and UBSan: OPS=10000000 SEED=1
	@build/release/pool_fuzz --ops $(OPS) --seed $(SEED)
	@build/asan/pool_fuzz --ops $$(($(OPS) / 10)) --seed $(SEED)

soak: build/release/pool_soak ## A million requests for each kind of compaction, with and without groups and pins: REQUESTS=1000000 SEED=1
	@for mode in off idle live; do for more in "" "--groups 2 --pins 8"; do \
	  build/release/pool_soak --mode $$mode --requests $(REQUESTS) --seed $(SEED) $$more || exit 1; \
	  done; done

soak-transfer: tools ## A million calls of the manager with transfers in flight, moves and faults: CALLS=1000000 SEED=1
	@$(TEST_ENV) $(BIN)/python tests/manager/differential/transfer_soak.py --operations $(CALLS) --seed $(SEED)

load: tools ## An hour of mixed clients on two ranks, then what is left and the same tokens: MINUTES=60 SEED=1
	@$(TEST_ENV) $(BIN)/python tests/e2e/load_run.py --minutes $(MINUTES) --seed $(SEED) --stock \
	  --out build/load/load.json

attention-sweep: tools ## Attention over ranges in CASES drawn shapes, interpreted: CASES=200
	@TAGMA_ATTENTION_SWEEP=$(CASES) $(TEST_ENV) $(BIN)/python -m pytest -q -o timeout=7200 tests/kernels/test_kernels.py \
	  -k "attention and interpreter"

nightly: fuzz soak soak-transfer upstream load attention-sweep ## What takes too long for every change: hours; SEED=1 MINUTES=60

upstream: tools ## vLLM's own scheduler and cache tests on this package: 20 minutes; ACCEPT=1 writes docs/upstream.md
	@$(SETUP) upstream
	@$(BIN)/python tests/upstream/upstream_run.py --jobs $(JOBS) $(if $(ACCEPT),--accept)

.PHONY: docs
docs: tools ## The documentation as a site, build/docs/html; a link that leads nowhere fails
	@$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs -d build/docs/doctrees . build/docs/html

drift: env ## Does vLLM's newest release still fit? VERSION=0.34.0; ACCEPT=1 writes docs/drift
	@$(BIN)/python tools/drift.py $(if $(VERSION),--version $(call quote,$(VERSION))) $(if $(ACCEPT),--accept)

wheel: tools ## Build sdist and abi3 wheel, audit, install into empty environments and import
	@$(SETUP) wheel

pytest: tools
	@$(SETUP) nixl model vllm-sources upstream
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

test-fast: tools ## pytest without the tests that start an engine
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not engine" $(PYTEST_ARGS)

gpu-check: ## Check and time the V2 kernels on a CUDA GPU (needs torch and Triton only)
	@PYTHONPATH=src $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m vllm_tagma.lab.kernel_check.gpu_check

bench-smoke: tools ## Serve both backends on the CPU and compare: OUT=build/bench-smoke ARGS="flags"
	@$(SETUP) model
	@$(BIN)/tagma bench serve --profile cpu-smoke --output $(call quote,$(OUT)) $(ARGS)

bench-commits: tools ## Host benchmark of two commits by turns: BASE=commit ARGS="--pairs 6"
	@$(PYTHON) tools/compare_commits.py --base $(call quote,$(BASE)) $(ARGS)

doctor: env ## What is installed, which seams fit, what MODEL would be refused for
	@$(BIN)/tagma doctor $(if $(MODEL),$(call quote,$(MODEL))) $(if $(ARGS),-- $(ARGS))

env: python ## Build .venv with vLLM and this package
	@$(SETUP) env

.PHONY: tools
tools: python
	@$(SETUP) env tools

python:
	@$(PYTHON) tools/check_python.py

clean: ## Remove build outputs (keeps .venv and .model)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## Remove .venv and .model as well
	rm -rf .venv .model
