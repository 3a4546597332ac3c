# Needs python3 (3.11 or newer), pip and make. uv goes into .tools, everything else into .venv;
# nothing is installed outside this folder, and a second run finds both ready.

SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= python3
UV_VERSION := 0.13.8
UV := .tools/bin/uv
BIN := .venv/bin

# An interpreter that is already here, never a downloaded one; and this folder's environment, even
# where another one is active.
export UV_PYTHON_PREFERENCE ?= only-system
# The certificates that this machine trusts, as pip does: behind a company's proxy uv's own fail.
export UV_SYSTEM_CERTS ?= true
export UV_PROJECT_ENVIRONMENT := .venv
unexport VIRTUAL_ENV
# Bytecode is kept: without it each of the hundreds of processes that tests start takes 3 s of CPU
# more to import what it needs.
export UV_COMPILE_BYTECODE ?= 1
unexport PYTHONDONTWRITEBYTECODE
# One more than there are cores: tests of real processes wait for them most of the time.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)

# Which run the keys of docker compose are for.
SKERRY_RUN ?= compose

# What `make check` compares with, to know which packages you have touched.
BASE ?= main

.PHONY: help setup demo check test drill torch lint types-mypy types-pyright format proto simulate bench gpu docs release secrets clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: .venv/.ready ## install everything that development and tests need

demo: .venv/.runtime ## train a model on this machine, kill a learner, watch it come back (ARGS=...)
	$(BIN)/skerry demo $(ARGS)

check: .venv/.ready ## an answer within a minute: style, imports, mypy, tests of what you touched
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python .ci/touched.py $(BASE) | xargs -r $(BIN)/python -m pytest -q -n $(WORKERS) $(ARGS)

test: .venv/.ready ## every test but the drills, four to seven minutes on two cores (ARGS=...)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

drill: .venv/.ready ## the long tests: real processes killed and stopped, images, the wheel (ARGS=...)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "drill and not soak" --durations 25 $(ARGS)

torch: .venv/.torch ## install PyTorch, for the tests of its learners; without it they are skipped

lint: .venv/.ready ## style, types, import contracts, generated code
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory -j2 types-mypy types-pyright
	$(BIN)/python proto/generate.py --check

types-mypy: .venv/.ready
	$(BIN)/mypy

types-pyright: .venv/.ready
	$(BIN)/pyright

format: .venv/.ready ## rewrite the sources in the house style
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: .venv/.ready ## regenerate shared/skerry/protocol/v1 from proto/
	$(BIN)/python proto/generate.py

simulate: .venv/.ready ## ten thousand schedules of faults on a virtual clock; make test runs 40
	$(BIN)/python -m pytest -n auto --dist worksteal -m "soak or not soak" tests/simulation/test_schedules.py $(ARGS)

bench: .venv/.ready ## measure what docs/results quotes (ARGS="codec --json out.json")
	$(BIN)/python -m tests.bench $(ARGS)

gpu: .venv/.ready ## what a learner makes of this machine's accelerator, in under ten minutes
	PYTHONPATH=. $(BIN)/python tests/bench/bench_gpu.py $(ARGS)

docs: .venv/.ready ## build the book into build/book; a broken link fails it
	$(UV) sync --frozen --inexact --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

release: .venv/.ready ## wheel, source archive, checksums and their signature in dist (KEY=~/.ssh/id_ed25519)
	$(BIN)/python .ci/release.py $(KEY) $(ARGS)

secrets: infra/secrets/route_password infra/secrets/page_token infra/secrets/keys.json ## write what docker compose keeps secret
	@grep -qF '"run": "$(SKERRY_RUN)"' infra/secrets/keys.json || { echo "infra/secrets has no keys of run $(SKERRY_RUN): set SKERRY_RUN to their run, or remove that folder." >&2; exit 2; }

clean: ## remove environments, builds and caches; runs in .skerry stay
	rm -rf .venv .tools build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's pip refuses to install into the system and its python3 has no ensurepip, so that neither
# `pip install --user` nor `python3 -m venv` works there; `--target` does everywhere.
$(UV):
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { echo "$(PYTHON) has no pip: apt install python3-pip"; exit 1; }
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --target .tools "uv==$(UV_VERSION)"

# The two stamps only ever add packages (--inexact): going from `make demo` to `make test` and back
# reinstalls nothing.
.venv/.runtime: pyproject.toml uv.lock | $(UV)
	$(UV) sync --frozen --inexact --no-dev --extra all
	$(UV) pip install --quiet pip
	@touch $@

.venv/.ready: pyproject.toml uv.lock | $(UV)
	$(UV) sync --frozen --inexact
	$(UV) pip install --quiet pip
	@touch .venv/.runtime $@

# pip, not uv: it takes a CPU build where this machine's own configuration points to one. It is that
# of .venv: a python3 on the path that is .venv's own has no other.
.venv/.torch: | .venv/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 lightning accelerate
	@touch $@

# The folder keeps other users out; the files themselves are readable because containers see them
# under another user id.
infra/secrets/route_password infra/secrets/page_token:
	@mkdir -p -m 700 $(@D)
	$(PYTHON) -c "import secrets; print(secrets.token_urlsafe(24))" > $@
	@chmod 644 $@

infra/secrets/keys.json: | .venv/.runtime
	@mkdir -p -m 700 $(@D)
	$(BIN)/skerry keys init --keys $(@D) --run $(SKERRY_RUN) \
		--founder learner-1 --founder learner-2 --learner learner-gpu
	@chmod 644 $(@D)/*.nk && chmod 755 $(@D)/broker
