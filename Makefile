# The commands of the project. `make demo` and `make test` need nothing but Python 3.11+ (with venv) and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One stamp for each set of extras: what runs a node, that and the tools of development, those and what tests/ops needs.
NODE   := $(VENV)/.installed-node
STAMP  := $(VENV)/.installed
SUITE  := $(VENV)/.schema-suite
OPS    := .venv-ops
RELEASE := .venv-dist
OPS_TESTS ?= tests/ops
# A kill while the environment was made leaves one without pip, which make takes for finished.
WHOLE   = $(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
# Only pip's errors: warnings about a user's own index settings would hide the one line that matters.
PIP     = $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install --constraint constraints.txt
# pytest and each process of the tests would compile all that it imports, again and again.
unexport PYTHONDONTWRITEBYTECODE
# The threads of numpy's matrix products spin while they wait: on busy cores that takes twenty times the CPU time of one.
export OPENBLAS_NUM_THREADS = 1

# On the CPU as it is: only the tests have an OpenVINO that can do with less, CONTRIBUTING.md.
PULL    = env -u ONEDNN_MAX_CPU_ISA $(BIN)/python -m worker_node pull --embedded

# What a node and a client install, with their extras, and under which licence.
LICENCES = $(BIN)/pip-licenses --from=mixed --no-version --format=markdown --order=name --partial-match --fail-on='GPL;General Public' \
	--packages $$(grep -v '^\#' packaging/node-packages.txt) av Deprecated dnspython fsspec jsonschema-rs limits pillow pyarrow redis wrapt

# A file runs as a whole on one worker, in the order of `testpaths`; tests/conftest.py keeps some files together.
# (`--dist loadgroup` has no effect with pytest 9.2: pytest-xdist 3.8 writes groups into an attribute that pytest no longer
# reads.)
PYTEST  = $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: help install demo serve test test-fast test-integrations test-all test-ops test-windows test-npu-compiler check format docs site dist deb bundle bench clean
.DEFAULT_GOAL := help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP)   ## install the project and all that it needs into .venv

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=/path/to/python3.11 install")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "Python's venv module is missing: apt install git make python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(NODE): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the node into $(VENV): about 110 MB to download, 380 MB on disk"
	@$(WHOLE)
	@$(BIN)/python packaging/install_node.py $(BIN)/python
	@touch $@

$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the node and its development tools into $(VENV): about 1 GB on disk"
	@$(WHOLE)
	@$(PIP) --progress-bar off --editable '.[node,convert,dev]'
	@touch $@ $(NODE)

# While the models are prepared another core compiles what was installed without bytecode. Held to another CPU, the demo
# needs the copy of OpenVINO that the tests have, and pytest to make it: CONTRIBUTING.md, "Other CPUs".
demo: $(if $(ONEDNN_MAX_CPU_ISA),$(STAMP),$(NODE)) ## install, prepare the models, start a node, call it, kill it, fall back to the cloud
	@echo "preparing two models: 176 MB to download, 206 MB on disk, once"
	@$(BIN)/python -c 'import examples.demo, worker_node.server, worker_node.tasks.generate.continuous' & \
		$(PULL) && wait && $(if $(ONEDNN_MAX_CPU_ISA),PYTHONPATH="$$($(BIN)/python -m tests.support.avx2)") $(BIN)/python examples/demo.py

serve: $(NODE)      ## run a node on this machine with the embedded models
	$(BIN)/python -m worker_node pull --embedded
	NPU_NODE_CONFIG=$${NPU_NODE_CONFIG-} $(BIN)/python -m worker_node serve

# Here, and not in the one test that reads it: a download may take longer than a test has.
$(SUITE): tests/unit/worker_node/structured_output/schema_suite.py | $(STAMP)
	@$(BIN)/python -m tests.unit.worker_node.structured_output.schema_suite
	@touch $@

test: install $(SUITE)  ## run the whole suite on real models
	$(PULL)
	$(PYTEST)

test-fast: install $(SUITE)  ## unit tests, and contract tests that need no model
	$(PYTEST) tests/unit tests/contract -m "not real and not slow"

test-integrations: install ## other projects' clients, frameworks and suites against a node
	$(PULL)
	$(PYTEST) tests/integrations

# The second run is that of a laptop's CPU: CONTRIBUTING.md, "Other CPUs".
test-all: install $(SUITE)  ## the suite with its long forms (chaos, fuzz, benchmarks), with integrations, coverage, and once more as on AVX2
	$(PULL)
	$(PYTEST) --long --cov --cov-report=term tests/integrations tests/real tests/contract tests/faults tests/unit
	ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST)

test-ops: $(VENV)/.installed-ops $(OPS)/.installed   ## provision machines with Ansible, alert, draw dashboards: what needs more than Python
	$(PULL)
	$(PYTEST) $(OPS_TESTS)

test-windows: install ## a node and its unit tests on Windows' own Python, under Wine
	$(PULL)
	@$(BIN)/python -c 'from tests.wine.windows import windows; windows()'
	$(BIN)/python -m pytest tests/wine/test_windows_node.py

test-npu-compiler: install ## compile what a node sends to an NPU with Intel's own compiler, under Wine; LONG=--long: all of it
	$(PULL)
	@$(BIN)/python -c 'from tests.wine.windows import windows; windows()'
	$(BIN)/python -m pytest $(LONG) tests/wine/test_npu_compiler.py

# Ansible has an environment of its own: what it is pinned to is not what the node is pinned to.
$(OPS)/.installed: ansible/requirements.txt
	$(PYTHON) -m venv $(OPS)
	$(OPS)/bin/python -m pip install --quiet --progress-bar off --requirement ansible/requirements.txt
	@touch $@

# Made first, it holds what the others install.
$(VENV)/.installed-ops: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(WHOLE)
	@$(PIP) --progress-bar off --editable '.[node,convert,dev,ops]'
	@touch $@ $(STAMP) $(NODE)

check: install      ## format, lint, layers, dependencies, types and licences
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/deptry worker_node backend_client
	@# Beside each other, each on a core.
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 & $(BIN)/mypy && wait $$!
	@$(LICENCES) > $(VENV)/licences.md
	@sed -n '/^|/p' docs/reference/licences.md | diff - $(VENV)/licences.md || { echo 'docs/reference/licences.md must be what pip-licenses says: make docs' >&2; exit 1; }

format: install     ## put the source into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install       ## write the references of settings, the client and the HTTP API from their declarations
	$(BIN)/python docs/settings_reference.py
	$(BIN)/python docs/client_reference.py
	$(BIN)/python -m docs.http_reference
	$(LICENCES) > $(VENV)/licences.md
	sed -i -e '/^|/d' docs/reference/licences.md && cat $(VENV)/licences.md >> docs/reference/licences.md

$(RELEASE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip --quiet --quiet --disable-pip-version-check install --constraint constraints.txt \
		hatchling twine cyclonedx-bom mkdocs-material
	@touch $@

site: $(RELEASE)/.installed   ## build the documentation as a site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(RELEASE)/bin/python -m mkdocs build --quiet --strict

dist: $(RELEASE)/.installed   ## build a release into dist/: wheel, sdist, Debian package (DEB=no: without), Containerfile, site, SBOM, SHA256SUMS
	packaging/dist.sh

deb:                ## build the Debian package for the Debian that this runs on into dist/
	packaging/deb/build.sh

bundle:             ## build dist/npu-node-bundle/, a node that runs without Python
	@command -v objdump > /dev/null || { echo "objdump is missing: apt install binutils" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; d, n, shared = sysconfig.get_config_vars("LIBDIR", "INSTSONAME", "Py_ENABLE_SHARED"); sys.exit(bool(shared) and not os.path.exists(f"{d}/{n}") and f"{n} is missing: apt install libpython3.{sys.version_info.minor}")'
	$(PYTHON) -m venv .venv-bundle
	@.venv-bundle/bin/python -m pip --quiet --quiet --disable-pip-version-check install --constraint constraints.txt \
		'.[node,convert]' pyinstaller==6.22.3
	packaging/bundle/build.sh

bench: install      ## measure; prints ratios made in one run, plots in build/bench; PEERS='--peer NAME=URL' adds servers
	$(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt matplotlib
	$(BIN)/python -m worker_node pull --embedded
	$(BIN)/python -m benchmarks --page build/bench $(PEERS)

clean:              ## remove what install and the tools made
	rm -rf $(VENV) $(OPS) .venv-bundle $(RELEASE) .mypy_cache .pytest_cache .ruff_cache .hypothesis
