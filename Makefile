# `make help` lists the targets. Each does its own set-up, and says what it is doing.
SHELL := /bin/bash
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
NPROC ?= 1
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help setup programs demo test test-slow test-again test-fast lint format serve learn launch doctor docs bench bench-gpu site sbom check

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## make .venv (SETUP=cpu or cuda; default: what the machine has)
	@deploy/setup.sh $(SETUP)

programs:  # what `setup` does, without the tools of tests and documentation
	@deploy/setup.sh $(or $(SETUP),auto) demo

demo: programs  ## the main job end to end on this machine: serve, learn, sync, compare (about 3 minutes)
	@$(PY) -m deploy.demo.run

test: setup  ## unit and integration tests, real vLLM included
	@$(PYTEST) -m "not slow" tests

test-slow: setup  ## what `make test` leaves out: variants of backends and adapters, faults, compilation, fuzzing, the wheel
	@$(PYTEST) -m slow tests

test-again: setup  ## the tests that failed last time, alone
	@$(PY) -m pytest --last-failed --last-failed-no-failures none tests

test-fast: setup  ## unit tests only
	@$(PYTEST) -m "not slow" tests/test_*.py tests/unit

lint: setup  ## ruff and mypy
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

format: setup  ## let ruff mend what it can
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

serve: programs  ## a rollout server: make serve CONFIG=server.yaml
	@$(PY) -m rollout_server --config $(or $(CONFIG),$(error CONFIG=server.yaml is missing))

learn: programs  ## a learner: make learn CONFIG=run.yaml NPROC=1
	@$(PY) -m deploy.torchrun --nproc $(NPROC) -- -m learner --config $(or $(CONFIG),$(error CONFIG=run.yaml is missing))

launch: programs  ## servers and learner together: make launch CONFIG=launch.yaml
	@$(PY) -m deploy.launch --config $(or $(CONFIG),$(error CONFIG=launch.yaml is missing))

bench: setup  ## speed and memory on what the machine has, into bench/results (NAME=latest)
	@$(PY) -m bench.run --name $(or $(NAME),latest)

bench-gpu: setup  ## the same on GPUs (NAME=gpu)
	@$(PY) -m bench.run --device cuda --name $(or $(NAME),gpu)

doctor: programs  ## what usually goes wrong, checked before a run: make doctor CONFIG=run.yaml
	@$(PY) -m learner doctor --config $(or $(CONFIG),$(error CONFIG=run.yaml is missing))

docs: setup  ## write CONFIG.md, the JSON Schemas and the site's reference pages from the code
	@$(PY) -m deploy.docs

site: setup  ## build the documentation into site/, without network
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --clean

sbom: setup  ## list the installed packages, with versions and licenses, in sbom.json (CycloneDX)
	@deploy/sbom.sh $(PY) sbom.json

check: lint site test test-slow  ## what CI runs
