# Every target sets up what it needs on first use and is quick afterwards.
#   make test ARGS="-k digest -x"      pass options on
#   make test VENV=/tmp/env PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 3
ARGS   ?=
MINUTES ?= 10
MODE   ?= input
SEED   ?=
VLLM   ?=
# what the tests run by default
VLLM_PINNED = $(shell sed -n 's/^vllm==//p' tests/engines/vllm/requirements.txt)
DEVICE ?= cpu
FRAMEWORK ?=
# Files that start with an underscore are helpers, not benchmarks; pause.py, pause_server.py and lora_server.py want vLLM's
# environment, gpu_figures.py a GPU too, sync.py and netns_demo.py root, density.py, figures.py and real_models.py a model,
# service_proof.py a bucket, wordle_gpu.py TRL, wordle_seeds.py half an hour.
APART  := density figures gpu_figures lora_server pause pause_server sync netns_demo real_models service_proof wordle_gpu wordle_seeds
BENCH  ?= $(filter-out $(APART:%=benchmarks/%.py),$(sort $(wildcard benchmarks/[a-z]*.py)))

# without cached bytecode every worker and every program that a test starts compiles the package anew
unexport PYTHONDONTWRITEBYTECODE

# Processes fork when all tests are collected (tests/jobs.py). One more than two cores: tests also wait, for disks,
# servers and clocks.
PYTEST := $(VENV)/bin/python -m pytest --jobs $(JOBS)

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check
READY  := $(VENV)/.deltawire-ready

.DEFAULT_GOAL := help
.PHONY: help setup demo netns-demo wordle-gpu test test-slow test-all test-gpu test-stores setup-vllm test-vllm setup-sglang test-sglang test-trainers canary test-browser release-check walk soak fuzz hub-proof bench figures docs lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## create the virtual environment with pinned versions, compile kernels (again only when the pins change)
	@echo "$(VENV) is ready"

demo: $(READY)  ## a policy learns Wordle while two servers follow it through a bucket, then a larger model; two to six minutes
	@$(BIN)/deltawire demo $(ARGS)

netns-demo: $(READY)  ## the same in four network namespaces over links of 20 Mbit/s, deltas against full weights (root)
	@$(BIN)/python benchmarks/netns_demo.py $(ARGS)

# On a GPU with the environment of $(PYTHON), which has TRL, a GPU build of vLLM and deltawire in it; else with one for CPUs.
wordle-gpu:  ## a language model learns Wordle with stock TRL, a bucket and vLLM: deltas, full weights and no sync; DEVICE=cpu: a tiny model
	@if [ "$(origin DEVICE)-$(DEVICE)" != "command line-cpu" ] && $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		$(PYTHON) benchmarks/wordle_gpu.py --device cuda $(ARGS); \
	else \
		$(MAKE) --no-print-directory $(READY) && $(BIN)/python benchmarks/wordle_gpu.py --device cpu $(ARGS); \
	fi

test: $(READY)  ## the everyday tests: all but the slow ones
	@$(PYTEST) $(ARGS)

test-slow: $(READY)  ## the slow tests alone, with more random examples
	@$(PYTEST) -m slow --timeout 900 --hypothesis-profile thorough $(ARGS)

test-all: $(READY)  ## everyday and slow tests, with more random examples
	@$(PYTEST) -m "" --timeout 900 --hypothesis-profile thorough $(ARGS)

soak: $(READY)  ## one trainer, twelve replicas, a real S3 server and faults, for MINUTES=10 (SEED= repeats a run)
	@$(BIN)/python -m soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: $(READY)  ## mutated files, runs and requests against all that reads them, or with MODE=interrupt signals at random moments, for MINUTES=10 (SEED= repeats a run)
	@$(BIN)/python tests/fuzz --mode $(MODE) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

# With the environment of $(PYTHON), which has a GPU build of torch and deltawire in it.
test-gpu:  ## the tests of what runs on a GPU (PYTHON=python of an environment with CUDA)
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "$(PYTHON) finds no GPU"; exit 1; }
	@$(PYTHON) -m pytest -p no:cacheprovider -m "" --timeout 900 tests/kernels tests/replica/test_replica_device.py \
		tests/trainer/test_detectors.py tests/trainer/test_shards.py tests/engines/server/test_loading.py $(ARGS)

test-stores: $(READY)  ## run whole runs and the store protocol on Azurite (npm) and moto (PyPI), installed outside the clone
	@$(BIN)/python -m pytest -p no:cacheprovider -m "" --timeout 900 tests/store/test_store_emulators.py $(ARGS)

setup-vllm:  ## make the environment of test-vllm (once, outside the clone)
	@tests/engines/vllm/environment.sh $(PYTHON) $(VLLM)

# The codecs are compiled into a cache of that environment: its numba is another one than that of $(VENV).
# Nodes of a live test have a /dev/shm of their own each, so the files of these tests lie elsewhere.
# With DEVICE=cuda: the environment of $(PYTHON), which has the GPU build of vLLM and deltawire in it.
test-vllm:  ## run the tests against a real vLLM, on the CPU in an environment made for it, or on a GPU (DEVICE=cuda)
ifeq ($(DEVICE),cuda)
	@DEVICE=cuda $(PYTHON) -m pytest -p no:cacheprovider -m "" --timeout 900 $(addprefix tests/engines/vllm/,live.py live_adapters.py live_drafts.py live_fp8.py) $(ARGS)
else
	@place=$$(tests/engines/vllm/environment.sh $(PYTHON) $(VLLM)) && \
	$$place/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e . && \
	PYTEST_DEBUG_TEMPROOT=/tmp NUMBA_CACHE_DIR=$$place/numba $$place/bin/python -m pytest -p no:cacheprovider -m "" --timeout 900 \
		$(if $(filter-out $(VLLM_PINNED),$(VLLM)),tests/engines/vllm/older.py,$(addprefix tests/,engines/vllm/conversions.py engines/vllm/live.py engines/vllm/live_adapters.py engines/vllm/live_drafts.py engines/vllm/live_fp8.py engines/vllm/live_import.py engines/vllm/live_trainer.py engines/vllm/live_kinds.py docs/live_documents.py)) $(ARGS)
endif

setup-sglang:  ## make the environment of test-sglang (once, outside the clone)
	@tests/engines/sglang/environment.sh $(PYTHON)

test-sglang:  ## run the tests against a real SGLang on the CPU, in an environment made for it
	@place=$$(tests/engines/sglang/environment.sh $(PYTHON)) && \
	$$place/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e . && \
	NUMBA_CACHE_DIR=$$place/numba $$place/bin/python -m pytest -p no:cacheprovider -m "" --timeout 900 $(addprefix tests/engines/sglang/,live.py live_sglang_adapters.py) $(ARGS)

test-trainers:  ## run the tests against a real training framework on the CPU, in an environment made for it (FRAMEWORK=verl, swift or megatron)
	@test -d "tests/frameworks/$(FRAMEWORK)" -a -n "$(FRAMEWORK)" || { echo "say which: make test-trainers FRAMEWORK=verl, swift or megatron"; exit 2; }
	@place=$$(tests/frameworks/environment.sh $(FRAMEWORK) $(PYTHON)) && \
	$$place/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e . && \
	NUMBA_CACHE_DIR=$$place/numba $$place/bin/python -m pytest -p no:cacheprovider -m "" --timeout 900 $(wildcard tests/frameworks/$(FRAMEWORK)/live*.py) $(ARGS)

canary: $(READY)  ## install the newest TRL, transformers, vLLM, SGLang, verl, DeepSpeed and ms-swift beside this clone, and say of each what changed (ARGS="trl --contracts --json")
	@$(BIN)/python tests/canary.py $(ARGS)

# these files are not named test_…: the everyday tests need no browser
test-browser: $(READY)  ## open every page in a real Chromium (Debian's package chromium) and use its controls
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[browser,docs]'
	@$(BIN)/python -m pytest -p no:cacheprovider $(filter-out %/conftest.py,$(wildcard tests/browser/*.py)) $(ARGS)

release-check: $(READY)  ## build sdist and wheel, and prove that both install and run in clean environments
	@$(BIN)/python tests/release.py

hub-proof: $(READY)  ## a run on a real service, and a report: BUCKET=hf://buckets/me/scratch (or s3://…)
	@test -n "$(BUCKET)" || { echo "say where: make hub-proof BUCKET=hf://buckets/me/scratch"; exit 2; }
	@$(BIN)/python benchmarks/service_proof.py "$(BUCKET)" $(ARGS)

walk: $(READY)  ## the quick start with a model of your own, in a fresh clone and environment, timed
	@PYTHONPATH=. $(BIN)/python tests/docs/walk.py

bench: $(READY)  ## run the benchmarks (one of them: make bench BENCH=benchmarks/memory.py)
	@test -n "$(BENCH)" || { echo "no benchmarks found in benchmarks/"; exit 1; }
	@for file in $(BENCH); do echo "== $$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; done

figures: $(READY)  ## record the data of the interactive figures again, and build their pages (ARGS=bits: only that one)
	@$(BIN)/python benchmarks/figures.py $(ARGS)
	@$(BIN)/python docs/figures/build.py

docs: $(READY)  ## build the documentation site into site/ (Python 3.11 or newer); every link is checked
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)
	@echo "site/index.html"

lint: $(READY)  ## check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/python -m mypy --config-file tests/programs.ini

format: $(READY)  ## sort imports, fix what can be fixed, format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove caches and build outputs (the virtual environment stays)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	@find src tests benchmarks soak -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch goes first and alone: resolved together with others, pip may choose a build of several GB.
# The build back end is pinned too, hence no build isolation.
# Triton's interpreter runs the kernels in tests. It is not in constraints.txt, and comes without dependencies: builds of
# torch for CUDA name another version, whose interpreter rounds a multiply-add twice.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "deltawire needs Python 3.10 or newer, and '$(PYTHON)' was not found; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { echo "deltawire needs Python 3.10 or newer, and '$(PYTHON)' is not ($$($(PYTHON) -V 2>&1 | head -n 1)); try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -c constraints.txt torch==2.13.0
	@$(PIP) -c constraints.txt hatchling
	@$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(PIP) --no-deps 'triton==3.9.0; python_version >= "3.11"' 'triton==3.8.0; python_version < "3.11"'
	@$(BIN)/python tests/precompile.py
	@touch $@
