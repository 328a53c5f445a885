# make demo and make test do all the set-up they need, and run again install nothing.
# PYTHON=/path/to/python chooses the interpreter (>= 3.12).

FLOOR := jax==0.11.2 jaxlib==0.11.2
export PYTHON

.PHONY: help demo test test-all test-floor lint format venv

help:
	@echo 'make demo        write a conversation at TP=3, continue it at TP=1 and TP=9'
	@echo 'make test        the tests (minutes)'
	@echo 'make test-all    the tests, with the long ones and the notebook'
	@echo 'make test-floor  the tests on the oldest jax that kvmem supports'
	@echo 'make lint        ruff check and ruff format --check'
	@echo 'make venv        only the set-up, in .venv/'

demo: venv
	.venv/bin/python -m experiments run configs/handoff.toml

test: venv
	.venv/bin/python -m pytest

test-all: venv
	.venv/bin/python -m pytest --long

test-floor:
	@.ci/make_venv .venvs/floor $(FLOOR)
	.venvs/floor/bin/python -m pytest

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: venv
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

venv:
	@.ci/make_venv .venv
