.DEFAULT_GOAL := help
.PHONY: help setup cases full test browser gpu-matrix bench soak example report lint

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PAGE := reports/divergence.html

# A PYTHON that somebody chose is taken or refused; only the default looks further.
ifeq ($(origin PYTHON),file)
CANDIDATES := $(PYTHON) python3.11 python3.12 python3.13 python3.14
GPU_PYTHON := $(BIN)/python
GPU_SETUP := $(STAMP)
else
CANDIDATES := $(PYTHON)
# It has a torch that was built for this machine: nothing is installed, least of all another torch.
GPU_PYTHON := $(PYTHON)
GPU_SETUP :=
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12      the interpreter that .venv is made with (3.11 or newer)"
	@echo "                         for gpu-matrix: one that has a torch for this GPU, used as it is"
	@echo "  PYTEST_ARGS='-k lstm'  more arguments for pytest, in every target that runs it"

setup: $(STAMP) ## create .venv with the pinned versions; the other targets do it themselves

cases: $(STAMP) ## run the cases (CI-sized) and write reports/divergence.html
	@$(call run_cases,,$(BIN)/pytest cases/ -n auto)

full: $(STAMP) ## run the cases in every precision and on up to 8 replicas
	@$(call run_cases,EQUIVTEST_FULL=1,$(BIN)/pytest cases/ -n auto)

test: $(STAMP) ## run the tests
	$(BIN)/pytest tests -n auto --hypothesis-profile=ci $(PYTEST_ARGS)

browser: $(STAMP) ## install a Chromium for the tests of the page, which are skipped without one
	@if command -v chromium >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-liberation \
	    >/dev/null; \
	else $(BIN)/playwright install chromium; fi
	@echo "a browser is there: make test runs the tests of the page"

# From here, with this interpreter, whether or not equivtest is installed in it.
gpu-matrix: $(GPU_SETUP) ## run the cases in every precision on the GPUs at hand (NCCL)
	@export PYTHONPATH="$$PWD$${PYTHONPATH:+:$$PYTHONPATH}"; \
	arguments=$$($(GPU_PYTHON) -m equivtest devices --max-D 8) || exit $$?; \
	$(call run_cases,EQUIVTEST_FULL=1 EQUIVTEST_GPU=1,$(GPU_PYTHON) -m pytest cases/ $$arguments --equiv-device=cuda)

bench: $(STAMP) ## what a case costs, in ratios against baselines of the same run (ten minutes)
	PYTHONPATH=. $(BIN)/python tests/bench/bench.py

soak: $(STAMP) ## draw thousands of correct and faulty loops (long)
	$(BIN)/pytest tests/soak -n auto --hypothesis-profile=full $(PYTEST_ARGS)

example: $(STAMP) ## make the example report anew (and its picture, where chromium is installed)
	-$(BIN)/pytest tests/example/example.py -n auto -q --equiv-reports=build/example
	cp build/example/divergence.html reports/example.html
	if command -v chromium >/dev/null; then chromium --headless --no-sandbox --disable-gpu \
	  --disable-background-networking --hide-scrollbars --user-data-dir=build/chromium \
	  --window-size=1240,1230 --screenshot=reports/example.png "file://$$PWD/reports/example.html"; fi

report: $(STAMP) ## render the page again from the records of the last runs
	$(BIN)/equivtest report reports

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page is most wanted when cases fail: say where it is, then pass pytest's status on.
define run_cases
status=0; $(1) $(2) $(PYTEST_ARGS) || status=$$?; \
if [ -f $(PAGE) ]; then echo "report: $(PAGE)"; else echo "report: none was written"; fi; \
exit $$status
endef

# An environment that is there and works is kept: only what pyproject.toml and constraints.txt
# changed is installed again.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c 'import pip' 2>/dev/null; then \
	  python=; \
	  for candidate in $(CANDIDATES); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      python=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "equivtest needs Python 3.11 or newer; tried: $(CANDIDATES)." \
	      "Name one with 'make PYTHON=/path/to/python3.12 ...'." >&2; \
	    exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$($$python --version)"; \
	  if ! $$python -m venv --clear $(VENV); then \
	    echo "'$$python -m venv' failed: on Debian and Ubuntu, install python3-venv." >&2; \
	    exit 1; \
	  fi; \
	fi
	@echo "installing the pinned versions into $(VENV) (a minute or more the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
