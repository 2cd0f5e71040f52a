# One command does its own set-up: `make demo`, `make test`, `make docs`.
#
#   PYTHON   which Python makes the environment (3.11 or newer)
#   VENV     where that environment lives
#   N        how many random programs `make test-long` draws
#   MINUTES  how long `make chaos` hurts workers
#   FILES    the changed files for which `make test-for` runs tests
#   MUTANTS  not empty: `make test-for` tries the faults of these files as well

PYTHON ?= python3
VENV ?= .venv
N ?= 3000
MINUTES ?= 60
FILES ?=
MUTANTS ?=

# Without bytecode each process compiles all modules anew: a third of a test's start.
export PYTHONDONTWRITEBYTECODE =

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
SOURCES := jdag tests $(wildcard docs/*.py docs/*/*.py paper/*.py paper/*/*.py scenarios/*.py)
# The command says which tier, not the environment.
unexport JDAG_TIER
# Which make runs lint beside the tests.
SUITE := MAKE="$(MAKE)" $(BIN)/python -m tests.tools.suite

.DEFAULT_GOAL := demo
.PHONY: demo test test-all test-for test-long versions lint mutants bench chaos docs
.PHONY: install install-test install-docs clean

demo: install
	$(BIN)/jdag run scenarios/digits.toml

# Every fact once, and lint. Failed tests are run again; see tests/tools/suite.py.
test: install-test
	@$(SUITE) --lint --tier first

# All: more random programs, and what takes long.
test-all: install-test
	@$(SUITE) --lint --tier all

# What versions of Python and JAX can change; the sources are still the same text.
versions: install-test
	@$(SUITE) --tier versions

# The tests of changed files: make test-for FILES="jdag/sim/network.py"
test-for: install-test
	@$(BIN)/python -m tests.tools.for_change $(if $(MUTANTS),--mutants) $(FILES)

test-long: install-test
	JDAG_PROGRAMS=$(N) $(BIN)/python -m pytest -q -n 2 -m long tests/

lint: install-test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports

# Each fault of tests/tools/mutants.toml has to make a test fail.
mutants: install-test
	$(BIN)/python -m tests.tools.mutants -n 2

bench: install
	$(BIN)/python paper/figures.py
	$(BIN)/python paper/modes.py
	$(BIN)/python -m paper.replicas
	$(BIN)/python -m paper.retiming
	$(BIN)/python -m paper.data_parallel
	$(BIN)/python -m paper.prediction
	$(BIN)/python -m paper.cold

# The documents as pages in build/docs/; a warning is an error.
docs: install-docs
	$(BIN)/python -m sphinx -E -W -n -q -b html docs build/docs
	@echo "open build/docs/index.html"

# Workers hurt in every way, by seed; on loopback.
chaos: install-test
	$(BIN)/python -W ignore -m paper.chaos --minutes $(MINUTES)

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test
install-docs: $(VENV)/.installed-docs

# The stamps live inside the environment: they go when it goes, and a newer
# pyproject.toml makes them stale.
$(VENV)/.installed: pyproject.toml | $(BIN)/pip
	@echo "installing jdag into $(VENV) (once, a minute or two)"
	@$(PIP) install -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/pip
	@echo "installing jdag and its tests' tools into $(VENV) (once, a minute or two)"
	@$(PIP) install -e '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/pip
	@echo "installing jdag and what builds its documents into $(VENV) (once, a minute or two)"
	@$(PIP) install -e '.[docs]'
	@touch $@ $(VENV)/.installed

# pip, not python: a venv that was interrupted has the one and not the other.
$(BIN)/pip:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "jdag needs Python 3.11 or newer, and there is no $(PYTHON) here;" \
	       "name one: make PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jdag needs Python 3.11 or newer, and $(PYTHON) is" \
	       "`"$(PYTHON)" --version 2>&1`; name another: make PYTHON=python3.11"; \
	  exit 1; }
	@"$(PYTHON)" -m venv $(VENV)

# What tools leave behind; the environments and runs/ stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find jdag tests scenarios paper -name __pycache__ -prune -exec rm -rf {} +
