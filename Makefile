# `make tutorial` and `make test` work on a machine that has only Python 3.10+ with venv, make and git.
# Variables: PYTHON (the interpreter to start from), VENV (where to install), PY (an environment of your own, used as it is).

PYTHON ?= python3
VENV ?= .venv
export PYTHON

ifdef PY
INSTALLED :=
DOCS_INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
endif

.DEFAULT_GOAL := help
.PHONY: help install tutorial test test-unit test-matrix lint ruff types imports docs bench clean distclean

help:  ## show this text
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 20

install: $(INSTALLED)  ## make .venv with everything that tutorial, test, lint and bench need

$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup_venv.sh
	@echo "installing into $(VENV) (once; a few minutes)"
	@scripts/setup_venv.sh $(VENV) tutorials,dev
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@scripts/setup_venv.sh $(VENV) docs
	@touch $@

tutorial: $(INSTALLED)  ## prepare a model and data, train it on every device, show the result
	$(PY) scripts/prepare_tutorial.py
	$(PY) tutorials/train_gpt.py --embedded
	$(PY) tutorials/inference_gpt.py

test: $(INSTALLED)  ## run every test that this machine can run
	@$(PY) -m pytest -q --durations=25

test-unit: $(INSTALLED)  ## run the tests that need no worker process
	@$(PY) -m pytest -q tests/unit

test-matrix: $(INSTALLED)  ## every family under every plan (up to an hour); its numbers go to docs/reference/exactness.json
	@OMP_NUM_THREADS=1 MOREH_MATRIX=full MOREH_MATRIX_RESULTS=docs/reference/exactness.json \
		$(PY) -m pytest -q tests/process/test_matrix.py; \
		status=$$?; $(PY) scripts/exactness_page.py && exit $$status

lint: ruff types imports  ## everything below that CI checks besides the tests

ruff: $(INSTALLED)  ## style
	@$(PY) -m ruff check .

types: $(INSTALLED)  ## types
	@$(PY) -m mypy

imports: $(INSTALLED)  ## which module may import which
	@$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

docs: $(DOCS_INSTALLED)  ## build the documentation into site/
	@$(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

bench: $(INSTALLED)  ## step time against hand-written torchrun scripts
	$(PY) scripts/bench_overhead.py

clean:  ## remove what builds and tests left
	rm -rf site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## remove the environment too
	rm -rf $(VENV)
