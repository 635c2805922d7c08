# The commands of the project. `make demo` and `make test` need nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OPS    := .venv-ops
OPS_TESTS ?= tests/ops

.PHONY: install demo serve test test-fast test-all test-ops check format docs bench clean
.DEFAULT_GOAL := help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP)   ## install the project and all that it needs into .venv

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=/path/to/python3.11 install")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar on --constraint constraints.txt --editable '.[node,convert,dev]'
	@touch $@

demo: install       ## install, prepare the models, start a node, call it, kill it, fall back to the cloud
	$(BIN)/python -m worker_node pull --embedded
	$(BIN)/python demo.py

serve: install      ## run a node on this machine with the embedded models
	$(BIN)/python -m worker_node pull --embedded
	$(BIN)/python -m worker_node serve

test: install       ## run the whole suite on real models
	$(BIN)/python -m worker_node pull --embedded
	$(BIN)/python -m pytest -n auto --max-worker-restart 0

test-fast: install  ## unit tests, and contract tests that need no model
	$(BIN)/python -m pytest -n auto --max-worker-restart 0 tests/unit tests/contract -m "not real and not slow"

test-all: install   ## the whole suite with its long forms (soak, fuzz, benchmarks), and coverage
	$(BIN)/python -m worker_node pull --embedded
	$(BIN)/python -m pytest -n auto --max-worker-restart 0 --long --cov --cov-report=term

test-ops: $(VENV)/.installed-ops $(OPS)/.installed   ## provision machines with Ansible, alert, draw dashboards: what needs more than Python
	$(BIN)/python -m worker_node pull --embedded
	$(BIN)/python -m pytest -n auto --max-worker-restart 0 $(OPS_TESTS)

# Ansible has an environment of its own: what it is pinned to is not what the node is pinned to.
$(OPS)/.installed: ansible/requirements.txt
	$(PYTHON) -m venv $(OPS)
	$(OPS)/bin/python -m pip install --quiet --progress-bar off --requirement ansible/requirements.txt
	@touch $@

$(VENV)/.installed-ops: $(STAMP)
	$(BIN)/python -m pip install --quiet --progress-bar off --constraint constraints.txt --editable '.[node,convert,dev,ops]'
	@touch $@

check: install      ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install     ## put the source into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install       ## write the reference of all settings from their declarations
	$(BIN)/python -m worker_node.settings.reference
	$(BIN)/python docs/client_reference.py

bench: install      ## measure; prints ratios made in one run
	$(BIN)/python -m worker_node pull --embedded
	$(BIN)/python -m benchmarks

clean:              ## remove what install and the tools made
	rm -rf $(VENV) $(OPS) .mypy_cache .pytest_cache .ruff_cache .hypothesis
