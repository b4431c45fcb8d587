# `make help` lists the targets.

SHELL := /bin/sh
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
# Packages of clients exclude each other: each list in tests/clients has an environment of its own.
CLIENTS := $(VENV)/clients/openai-3/.ready $(VENV)/clients/anthropic-2/.ready
ALL_CLIENTS := $(patsubst tests/clients/%.txt,$(VENV)/clients/%/.ready,$(wildcard tests/clients/*.txt))
# Those of frameworks take 3 GB, so only `make test-clients` makes them.
FRAMEWORKS := $(patsubst tests/clients/%.txt,$(VENV)/clients/%/.ready,$(wildcard tests/clients/frameworks/*.txt))
# Tests start a hundred processes, each of which would compile radixkv again.
unexport PYTHONDONTWRITEBYTECODE
# Tests run in several processes. With more threads each, torch's would wait for a core that another process has; those
# of the test that has two sleep meanwhile, because they would spin.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# An environment for the tests of stores that servers share.
STORES := $(VENV)/stores
# An environment for the tests of the CUDA kernels in Triton's interpreter, and of adapters that PEFT makes.
NIGHTLY := $(VENV)/nightly
KERNEL_TESTS := $(ONE_THREAD) $(NIGHTLY)/bin/python -m pytest --noconftest --numprocesses 2 --dist loadfile \
	-W ignore::RuntimeWarning -W ignore::DeprecationWarning
# What random histories and soaks are drawn from: another number every day, and `make test-nightly SEED=...` repeats one.
SEED ?= $(shell date +%Y%m%d)
MINUTES ?= 10
# What `make quick` tests: the parts that most changes touch, without a server or a model.
QUICK := tests/tree tests/runtime/scheduler tests/runtime/tenants tests/runtime/cache/test_page_cache.py tests/wire \
	tests/settings tests/runtime/test_step_plan.py tests/runtime/test_launched_steps.py
# The newest Python from 3.11 on that runs; `make PYTHON=...` takes another.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

# Makes the packages of VENV importable in another environment, after its own.
define share_packages
site=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$site')" \
	> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
endef

.PHONY: help demo quick test test-api test-chaos test-clients test-nightly test-routing test-stores test-ui lint types imports tests tests-gpu tests-read format constraints clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready  ## measures the prefix cache: a workload with the cache off and on
	$(VENV)/bin/radixkv bench --workload fewshot --num-shots 16 --compare-cache

# mypy takes one core, so pip, the tests of GPUs where there is one, and pytest's reading of all tests run
# beside it.
test: $(VENV)/.ready  ## what a change must pass: lint, types, import contracts, CPU tests
	$(MAKE) --jobs 2 types tests-read lint imports tests-gpu $(CLIENTS)
	$(MAKE) tests

quick: lint types imports $(VENV)/.ready  ## lint, types, contracts, and the tests of tree, cache, scheduler, steps, wire and settings
	$(ONE_THREAD) $(VENV)/bin/pytest -m 'not nightly' -q --forks 2 $(QUICK)

lint: $(VENV)/.ready  ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready  ## mypy, strict
	$(VENV)/bin/mypy

imports: $(VENV)/.ready  ## the import contracts
	$(VENV)/bin/lint-imports

tests-gpu: $(VENV)/.ready  ## tests that need a GPU, if there is one
	@if $(VENV)/bin/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; \
		then $(VENV)/bin/pytest tests/gpu; else echo "no CUDA device: tests/gpu are left out"; fi

# pytest compiles 600 files with its own assertions, and Python the packages that they import. Without what this leaves
# behind, each process of `tests` would do so by itself.
tests-read: $(VENV)/.ready
	@$(VENV)/bin/pytest --collect-only -q > $(VENV)/tests.txt || { cat $(VENV)/tests.txt; false; }

# One process reads all tests, and three forks of it run them: each of pytest-xdist's would read them all. Three use
# the two cores while tests wait for other processes, or for time to pass.
tests: $(VENV)/.ready $(CLIENTS)  ## all CPU tests but those of test-nightly
	$(ONE_THREAD) $(VENV)/bin/pytest -m 'not nightly and not clients and not ui and not stores and not routing and not api' --ignore tests/gpu --forks 3

test-clients: $(VENV)/.ready $(FRAMEWORKS)  ## frameworks for agents against a server
	$(VENV)/bin/pytest tests/clients/frameworks

test-ui: $(VENV)/.ready  ## the page /ui in Chromium; keeps pictures of it in .venv/ui
	$(VENV)/bin/pytest tests/ui --screenshots $(VENV)/ui

test-stores: $(VENV)/.ready $(STORES)/.ready  ## servers that share S3 (moto) or Mooncake, which needs libibverbs1
	$(STORES)/bin/python -m pytest tests/stores

test-routing: $(VENV)/.ready $(VENV)/routing/.ready  ## servers behind smg and Ray Serve
	$(VENV)/bin/pytest tests/routing -s

test-api: $(VENV)/.ready $(VENV)/api/.ready  ## a server against its OpenAPI document (SEED=...)
	$(VENV)/bin/pytest tests/api --hypothesis-seed $(SEED)

test-nightly: $(VENV)/.ready $(ALL_CLIENTS) $(NIGHTLY)/.ready  ## what takes too long for every change: tests/property/README.md (SEED=...)
	$(ONE_THREAD) $(VENV)/bin/pytest -m 'nightly or hypothesis' --ignore tests/gpu --numprocesses 2 --dist load \
		--hypothesis-profile nightly --hypothesis-seed $(SEED)
	TRITON_INTERPRET=1 $(KERNEL_TESTS) tests/gpu/test_gpu_kernels*.py tests/gpu/test_gpu_sampler*.py
	$(KERNEL_TESTS) tests/gpu/test_gpu_kernels_targets.py tests/checkpoints/test_peft_adapters.py \
		tests/llm/test_activated_adapters_of_peft.py
	$(VENV)/bin/python bench/soak.py --seed $(SEED) --output-file $(NIGHTLY)/soak.jsonl
	$(VENV)/bin/python bench/gpu_soak.py --device cpu --requests 5000 --seed $(SEED) --output-file $(NIGHTLY)/soak.jsonl
	$(MAKE) test-api SEED=$(SEED)
	$(MAKE) test-chaos SEED=$(SEED)

test-chaos: $(VENV)/.ready  ## strikes a server with faults under load: docs/chaos.md (MINUTES=..., SEED=...)
	PYTHONPATH=.:tests:bench $(VENV)/bin/python -m chaos --minutes $(MINUTES) --seed $(SEED) --output-file $(VENV)/chaos.jsonl

format: $(VENV)/.ready  ## fixes what ruff can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

constraints: $(VENV)/.ready  ## writes constraints.txt anew, from the installed packages
	@{ sed -n '/^#/p' constraints.txt; $(VENV)/bin/pip freeze --exclude-editable | grep -Ev '^(torch|triton|nvidia)'; } > constraints.new
	@mv constraints.new constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "radixkv needs Python 3.11 or newer; install it, or give make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Installing packages into $(VENV), torch among them: a minute or several" >&2
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'pip>=24'
	$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/clients/%/.ready: tests/clients/%.txt $(VENV)/.ready
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install --no-compile -r $<
	@touch $@

# The packages of VENV, Triton among them, with a NumPy that Triton's interpreter can use, and PEFT, which needs no
# packages but these and VENV's.
$(NIGHTLY)/.ready: pyproject.toml tests/checkpoints/peft.txt $(VENV)/.ready
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install --no-compile 'numpy<2.4'
	$(PIP) --python $(@D)/bin/python install --no-compile --no-deps -r tests/checkpoints/peft.txt
	$(call share_packages,$(@D))
	@touch $@

# The packages of VENV, with the clients of the stores and a server that speaks S3.
$(STORES)/.ready: tests/stores/requirements.txt $(VENV)/.ready
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install --no-compile -r $<
	$(call share_packages,$(@D))
	@touch $@

# Routers, with the packages of VENV behind their own. They are compiled: Ray gives its processes 15 s to import theirs.
$(VENV)/routing/.ready: tests/routing/requirements.txt $(VENV)/.ready
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install -r $<
	$(call share_packages,$(@D))
	@touch $@

# Schemathesis, which needs none of VENV's packages.
$(VENV)/api/.ready: tests/api/requirements.txt $(VENV)/.ready
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install --no-compile -r $<
	@touch $@

clean:  ## removes the environments
	rm -rf $(VENV)
