# `make book` and `make test` do all of their own set-up in .venv; `make help` lists the rest.
#
#   make PYTHON=/path/to/python3.12 ...    which Python the environment is made with (3.11, 3.12 or 3.13)
#   make TORCH_INDEX=URL ...               PyTorch's wheel index to install torch from (CPU or CUDA build)

.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:

ifeq ($(origin PYTHON),undefined)
# The first one on the PATH that will do; python3 when none does, so that the message names it.
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && exit; \
    done; echo python3)
endif
TORCH_INDEX ?=
BIN := .venv/bin
# Processes for the test suite; every notebook and test file stays in one of them.
WORKERS ?= 2
# Older Transformers releases that the sampling tests are tried against, beside the pinned one of .venv.
COMPAT := 5.11.0 5.15.0

# Without a PYTHON named by the user, a working environment of any supported Python is kept.
INSTALL_FLAGS = $(if $(filter file,$(origin PYTHON)),--any-python) $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")
define install
@command -v "$(PYTHON)" >/dev/null || \
    { echo "no $(PYTHON) here: install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 2; }
@"$(PYTHON)" requirements/install.py $(1) $(2) $(INSTALL_FLAGS)
endef

.PHONY: help
help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1 \t/' | expand -t 18

.PHONY: setup
setup: ## the environment in .venv (the other targets call this)
	$(call install,.venv,requirements.lock)

# One computing thread a process: the models are tiny, and two thread pools on two cores wait for each other.
.PHONY: book
book: export OMP_NUM_THREADS ?= 1
book: setup ## run every notebook with the quick profile, then build the book
	$(BIN)/dglab run --profile quick
	$(BIN)/dglab book

.PHONY: lab
lab: setup ## JupyterLab on the notebooks
	$(BIN)/dglab lab

.PHONY: test
test: export OMP_NUM_THREADS := 1
test: lint ## the whole suite: lint, then unit, parity, notebook and browser tests
	$(BIN)/python -m pytest --nbval --nbval-current-env --nbval-cell-timeout 600 -n $(WORKERS) --dist loadfile

.PHONY: gemma
gemma: setup ## Gemma 3 270M as a package, for notebook 05 (250 MB)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-build-isolation \
	    --constraint requirements.lock -e ".[gemma]"

.PHONY: llada
llada: ## an environment for LLaDA-MoE's own code, with Transformers 4.53, for notebook 05
	$(call install,.venv-llada,requirements/llada.lock)

.PHONY: lint
lint: setup ## format, lint, types, and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: normalise
normalise: setup ## format the code, and strip from the notebooks what changes with every run
	$(BIN)/ruff check --fix --exit-zero --quiet
	$(BIN)/ruff format
	$(BIN)/python tests/notebook_guard.py --normalise notebooks/*.ipynb

.PHONY: compat
compat: $(COMPAT:%=compat-%) compat-llada setup ## the tests of what must run on older Transformers, against each of them
	@echo "Transformers, the pinned release:"
	$(BIN)/python -m pytest -p no:cacheprovider tests/sampling

.PHONY: $(COMPAT:%=compat-%)
$(COMPAT:%=compat-%): compat-%:
	$(call install,.venv-compat/$*,requirements/compat-$*.lock)
	@echo "Transformers $*:"
	.venv-compat/$*/bin/python -m pytest -p no:cacheprovider tests/sampling

.PHONY: compat-llada
compat-llada: llada
	@echo "Transformers of LLaDA-MoE:"
	.venv-llada/bin/python -m pytest -p no:cacheprovider tests/engines/test_apart.py

# uv keeps the versions that are locked; `make lock UPGRADE=1` takes the newest instead.
LOCK = .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
    --excludes requirements/not-locked.txt --annotation-style line \
    --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
.PHONY: lock
lock: ## write requirements.lock and the others in requirements/ (needs the network)
	test -x .venv-lock/bin/uv || { "$(PYTHON)" -m venv .venv-lock && .venv-lock/bin/python -m pip install --quiet uv; }
	$(LOCK) --extra dev pyproject.toml --output-file requirements.lock
	$(LOCK) requirements/llada.in --output-file requirements/llada.lock
	@for v in $(COMPAT); do \
	    echo "transformers==$$v" | $(LOCK) - requirements/compat.in --output-file requirements/compat-$$v.lock || exit; \
	done

.PHONY: clean
clean: ## remove pages, executed notebooks and caches; environments and build/results stay
	rm -rf _build book/experiments book/_static/vendor .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .jupyter_cache
	if [ -d build ]; then find build -mindepth 1 -maxdepth 1 ! -name results -exec rm -rf {} +; fi
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
