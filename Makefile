# `make run` and `make test` do everything on a fresh machine; `make help` lists the rest.
SHELL := /bin/bash
PYTHON_BIN := .venv/bin/python
CONFIG ?= pipelines/configs/embedded.toml
ARGS ?=
WORKERS ?= auto
# Set-up leaves compiling to the first import: it must be allowed to keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(PYTHON_BIN) -m pytest $(if $(filter 0,$(WORKERS))$(findstring no:xdist,$(ARGS)),-p no:xdist,-n $(WORKERS) --dist loadscope)

.PHONY: help setup run test test-slow check format docs docs-pictures images bench gpu clean distclean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: ## make or renew .venv; does nothing when it is up to date. GPU=1 or GPU=0 overrides what nvidia-smi says
	@infra/setup.sh

run: setup ## train the embedded model; ARGS="train.seed=1" overrides values, CONFIG=file takes another configuration
	@.venv/bin/magrpo train $(CONFIG) $(ARGS)

test: setup ## every test but the slow ones; ARGS="-k rollout" picks some, WORKERS=0 runs one after another
	@$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup ## the tests that take minutes each
	@$(PYTEST) -m slow $(ARGS)

check: setup ## lint, formatting, types, import contracts
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo

format: setup ## rewrite the sources as ruff formats them
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

docs: setup .docs-venv/ready ## rewrite the pages made from the code, then build the site into build/site
	@$(PYTHON_BIN) -m tests.test_docs
	@NO_MKDOCS_2_WARNING=1 .docs-venv/bin/mkdocs build

docs-pictures: setup ## take the pictures under docs/ anew, of the pages of real runs (trains them: ten minutes)
	@$(PYTHON_BIN) infra/docs_pictures.py $(ARGS)

.docs-venv/ready: requirements/docs.txt
	@$(PYTHON_BIN) -m venv .docs-venv
	@.docs-venv/bin/pip install --no-deps --quiet --disable-pip-version-check -r $<
	@touch $@

images: setup ## build the container images, train by Compose, take all down (Debian, root)
	@type podman runc debootstrap catatonit iptables >/dev/null 2>&1 || { apt-get update -q && \
		apt-get install -y -q podman runc debootstrap catatonit netavark aardvark-dns iptables; }
	@$(PYTHON_BIN) -m pytest -m slow tests/infra/test_images.py $(ARGS)

bench: setup ## time an iteration, the loss beside other libraries, and an iteration beside CoMLRL's (ARGS are for the last)
	@.venv/bin/magrpo bench iteration $(CONFIG)
	@$(PYTHON_BIN) -m magrpo_kernels.bench
	@$(PYTHON_BIN) -m tests.benchmarks $(ARGS)

gpu: setup ## run the tests that need a GPU, then time the loss on it (ARGS are for the tests)
	@MAGRPO_LANE=gpu $(PYTHON_BIN) -m pytest -p no:xdist -m gpu $(ARGS)
	@$(PYTHON_BIN) -m magrpo_kernels.bench

clean: ## remove caches and build leftovers; keeps .venv and runs
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

distclean: clean ## also remove .venv, .bench-venv and .docs-venv
	@rm -rf .venv .bench-venv .docs-venv *.egg-info
