# `make tutorial` and `make test` work on a machine that has only Python 3.10+ with venv, make and git.
# Variables: PYTHON (the interpreter to start from), VENV (where to install), PY (an environment of your own, used as it is),
# LANES (how many processes of pytest share the test files; 0: one, in which a debugger can stop).

PYTHON ?= python3
NOTEBOOKS ?= tutorials/notebooks
VENV ?= .venv
SITE ?= site
DIST ?= dist
LANES ?= 2
MERMAID_VERSION := 11.17.2
MERMAID := docs/assets/vendor/mermaid.min.js
export PYTHON

ifdef PY
INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

.DEFAULT_GOAL := help
.PHONY: rank-hosts help install tutorials tutorial tutorial-mistral tutorial-llama2 tutorial-llama3-70b tutorial-hosts tutorial-lora tutorial-llm test test-unit test-gpu test-frameworks test-saves test-storm notebooks test-matrix lint ruff types imports wheel docs docs-sources bench compare clean distclean

help:  ## show this text
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 26

install: $(INSTALLED)  ## make .venv with everything that the other targets need

$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup_venv.sh
	@echo "installing into $(VENV) (once; a few minutes)"
	@scripts/setup_venv.sh $(VENV) tutorials,dev,docs
	@touch $@

tutorial: $(INSTALLED)  ## prepare a model and data, train it on every device, show the result
	$(PY) scripts/prepare_tutorial.py --only model dataset
	$(PY) tutorials/train_gpt.py --embedded
	$(PY) scripts/plot_losses.py outputs/train_gpt
	$(PY) tutorials/inference_gpt.py

tutorial-mistral: $(INSTALLED)  ## the same with a Mistral, from tokens in a file
	$(PY) scripts/prepare_tutorial.py --only model dataset
	$(PY) tutorials/prepare_mistral.py --embedded
	$(PY) tutorials/train_mistral.py --embedded
	$(PY) scripts/plot_losses.py outputs/train_mistral
	$(PY) tutorials/inference_mistral.py

tutorial-llama2: $(INSTALLED)  ## a Llama learns to summarise
	$(PY) scripts/prepare_tutorial.py --only model summaries
	$(PY) tutorials/train_llama2.py --embedded
	$(PY) scripts/plot_losses.py outputs/train_llama2
	$(PY) tutorials/inference_llama2.py

tutorial-llama3-70b: $(INSTALLED)  ## the plan of Llama 3 70B, and a small Llama in 8 stages on 8 workers
	$(PY) scripts/prepare_tutorial.py --only model summaries
	$(PY) tutorials/train_llama3_70b.py --show-plan
	$(PY) tutorials/train_llama3_70b.py --embedded
	$(PY) scripts/plot_losses.py outputs/train_llama3_70b
	$(PY) tutorials/inference_llama3_70b.py

tutorial-hosts: $(INSTALLED)  ## the small Llama in 8 stages on two hosts, which are agents on this machine
	$(PY) scripts/prepare_tutorial.py --only model summaries
	$(PY) scripts/with_hosts.py 2 -- $(PY) tutorials/train_llama3_70b.py --embedded --save-path outputs/train_llama3_70b_hosts
	$(PY) scripts/plot_losses.py outputs/train_llama3_70b_hosts

tutorial-lora: $(INSTALLED)  ## adapters of a frozen model
	$(PY) scripts/prepare_tutorial.py --only model dataset
	$(PY) tutorials/train_lora.py --embedded
	$(PY) scripts/plot_losses.py outputs/train_lora
	$(PY) tutorials/inference_lora.py

tutorial-llm: $(INSTALLED)  ## a GPT-2 from random weights, with timers and checkpoints
	$(PY) scripts/prepare_tutorial.py --only model config dataset
	$(PY) tutorials/train_llm.py --embedded
	$(PY) scripts/plot_losses.py outputs/train_llm/gpt2-embedded
	$(PY) tutorials/inference_llm.py

tutorials: tutorial tutorial-mistral tutorial-llama2 tutorial-llama3-70b tutorial-lora tutorial-llm  ## all of these, one after another

# Tests are small: threads of one would only wait for a core that another lane uses.
IN_LANES := OMP_NUM_THREADS=1 $(PY) -m pytest -q --numprocesses=$(LANES) --dist=loadfile

test: $(INSTALLED)  ## run every test that this machine can run, and name the slowest; RERUNS=1 runs what fails once more
	@$(IN_LANES) --durations=25 $(if $(RERUNS),--reruns=$(RERUNS))

test-unit: $(INSTALLED)  ## run the tests that need no process of their own
	@$(IN_LANES) tests/unit

# One environment a group: frameworks ask for versions of the same packages that do not go together.
FRAMEWORKS ?= $(basename $(notdir $(wildcard tests/frameworks/requirements/*.txt)))

test-gpu: $(INSTALLED)  ## the same trainings on one GPU, on a shared one, on several; CPU workers stand in where there is none
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -rf tests/gpu

test-frameworks: $(INSTALLED)  ## quick starts of other frameworks, FRAMEWORKS="lightning keras" for some of their groups
	@for group in $(FRAMEWORKS); do \
		scripts/framework_environment.sh $(VENV) $$group && \
		.venv-frameworks/$$group/bin/python -m pytest -q --timeout 600 tests/frameworks || failed="$$failed $$group"; done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

test-saves: $(INSTALLED)  ## kill a hundred runs while they save, and load what they leave (half an hour); KILLS=20 for fewer
	@MOREH_KILLS=$(or $(KILLS),100) OMP_NUM_THREADS=1 $(PY) -m pytest -q -rf tests/process/test_killed_saves.py \
		tests/process/test_automatic_checkpoints.py::test_no_kill_leaves_a_bad_checkpoint

test-storm: $(INSTALLED)  ## a hundred random faults while workers train (half an hour); FAULTS=20 for fewer, SEED=7 for those of a seed
	@$(PY) scripts/storm.py --faults $(or $(FAULTS),100) $(if $(SEED),--seed $(SEED))

# CPU workers everywhere. tqdm warns of a package for progress bars, which no notebook shows.
notebooks: $(INSTALLED)  ## run every notebook and compare what it prints with what is in it
	@CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONWARNINGS="ignore:IProgress not found" \
		$(PY) -m pytest -q -p no:cacheprovider --numprocesses=$(LANES) --dist=loadfile --nbval --nbval-current-env --nbval-cell-timeout 240 \
		--nbval-sanitize-with tutorials/notebooks/sanitize.cfg $(NOTEBOOKS)

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

wheel: $(INSTALLED)  ## build the package as one file, into dist/
	@$(PY) -m pip wheel --no-deps --quiet --wheel-dir $(DIST) .
	@ls $(DIST)/moreh_ap-*.whl

docs: docs-sources  ## build the documentation, English and Korean, into site/
	@for page in $$(find docs -name '*.md' ! -name '*.ko.md'); do \
		test -f $${page%.md}.ko.md || { echo "$$page is not translated" >&2; missing=1; }; done; test -z "$$missing"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir $(SITE)
	@echo "$(SITE)/index.html"

docs-sources: $(INSTALLED) $(MERMAID)
	@$(PY) scripts/api_reference.py
	@if [ -f scripts/notebook_pages.py ]; then $(PY) scripts/notebook_pages.py; fi

# The library that draws diagrams; npm checks what it fetches. Without npm, readers' browsers fetch it from unpkg.com.
# Another version of it: `make clean` first.
$(MERMAID):
	@if command -v npm >/dev/null; then \
		mkdir -p $(@D) && cd $(@D) && npm pack --silent mermaid@$(MERMAID_VERSION) >/dev/null && \
		tar -xzOf mermaid-$(MERMAID_VERSION).tgz package/dist/mermaid.min.js >mermaid.new && \
		mv mermaid.new $(@F) && rm mermaid-$(MERMAID_VERSION).tgz; \
	else \
		echo "npm is not installed: drawings will need a network (apt-get install npm)" >&2; \
	fi

PAIRS ?= 6

rank-hosts: $(INSTALLED)  ## ten plans on two hosts with a slow link, predicted and measured, on an idle machine; root
	$(PY) scripts/rank_on_slow_link.py

bench: $(INSTALLED)  ## measure the figures of docs/benchmarks.md on an idle machine, FIGURES="ddp fsdp" PAIRS=10 for some
	$(PY) scripts/bench.py $(FIGURES) --pairs $(PAIRS)

compare: $(INSTALLED)  ## the page that sets hand-written scripts beside the one line; MEASURE=--measure runs them again
	$(PY) scripts/compare_manual.py $(MEASURE)

clean:  ## remove what builds and tests left
	rm -rf site docs/assets/vendor .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## remove the environment too
	rm -rf $(VENV) .venv-frameworks
