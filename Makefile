# The two commands: `make demo` serves and measures the prefix cache, `make test` checks everything.

SHELL := /bin/sh
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
# Packages of clients exclude each other: each list in tests/clients has an environment of its own.
CLIENTS := $(patsubst tests/clients/%.txt,$(VENV)/clients/%/.ready,$(wildcard tests/clients/*.txt))
# The newest Python from 3.11 on that runs; `make PYTHON=...` takes another.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

.PHONY: demo test lint types imports tests format clean

demo: $(VENV)/.ready
	$(VENV)/bin/radixkv bench --workload fewshot --num-shots 16 --compare-cache

test: lint types imports tests

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

imports: $(VENV)/.ready
	$(VENV)/bin/lint-imports

tests: $(VENV)/.ready $(CLIENTS)
	$(VENV)/bin/pytest tests/gpu
	$(VENV)/bin/pytest --ignore tests/gpu --numprocesses 2 --dist loadfile

format: $(VENV)/.ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "radixkv needs Python 3.11 or newer; install it, or give make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Installing packages into $(VENV), torch among them: a minute or several" >&2
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'pip>=24'
	$(PIP) install -e '.[dev]'
	@touch $@

$(VENV)/clients/%/.ready: tests/clients/%.txt $(VENV)/.ready
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install --no-compile -r $<
	@touch $@

clean:
	rm -rf $(VENV)
