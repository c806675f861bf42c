# `make help` lists the targets. Each does its own set-up, and says what it is doing.
SHELL := /bin/bash
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
NPROC ?= 1
export PYTHONUNBUFFERED := 1
# Two workers would rewrite the assertions of every test module in every run, where the environment forbids to keep them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup programs demo test test-slow test-again test-fast lint format serve learn launch compose compose-demo doctor docs bench bench-gpu site sbom check no-config

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

lint: setup  ## ruff, mypy, and hadolint of the Dockerfile
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && .venv/bin/hadolint deploy/docker/Dockerfile

format: setup  ## let ruff mend what it can
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

# Asked before anything is installed.
serve learn launch doctor: $(if $(CONFIG),programs,no-config)

no-config:
	$(error CONFIG is missing: make $(firstword $(MAKECMDGOALS)) CONFIG=FILE.yaml)

serve:  ## a rollout server: make serve CONFIG=server.yaml
	@$(PY) -m rollout_server --config $(CONFIG)

learn:  ## a learner: make learn CONFIG=run.yaml NPROC=1
	@$(PY) -m deploy.torchrun --nproc $(NPROC) -- -m learner --config $(CONFIG)

launch:  ## servers and learner together: make launch CONFIG=launch.yaml
	@$(PY) -m deploy.launch --config $(CONFIG)

compose:  ## servers and learner in containers, until the learner ends: make compose DIR=deploy/compose
	@bash $(or $(DIR),deploy/compose)/run.sh

compose-demo:  ## the demo's method in containers, without a GPU; needs Docker and nothing else
	@mkdir -p data/compose-demo runs
	@cd deploy/compose/cpu && docker compose build && docker compose run --rm --no-deps --user "$$(id -u):$$(id -g)" \
	  --volume "$(CURDIR):/src:ro" --volume "$(CURDIR)/data:/src/data" --workdir /src learner deploy.demo.build_data \
	  --out data/compose-demo --train 192 --val 0 --test 200 --annotation-dropout 0.4 --seed 3
	@bash deploy/compose/cpu/run.sh

bench: setup  ## speed and memory on what the machine has, into bench/results (NAME=latest)
	@$(PY) -m bench.run --name $(or $(NAME),latest)

bench-gpu: setup  ## the same on GPUs (NAME=gpu)
	@$(PY) -m bench.run --device cuda --name $(or $(NAME),gpu)

doctor:  ## what usually goes wrong, checked before a run: make doctor CONFIG=run.yaml
	@$(PY) -m learner check --machine --config $(CONFIG)

docs: setup  ## write CONFIG.md, the JSON Schemas and the site's reference pages from the code
	@$(PY) -m tools.docs

site: setup  ## build the documentation into site/, without network
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --clean

sbom: setup  ## list the installed packages, with versions and licenses, in sbom.json (CycloneDX)
	@deploy/sbom.sh $(PY) sbom.json

check: lint site test test-slow  ## what CI runs
