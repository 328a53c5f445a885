# make demo and make test do all the set-up they need, and run again install nothing.
# PYTHON=/path/to/python chooses the interpreter (>= 3.12).

FLOOR := jax==0.11.2 jaxlib==0.11.2
# The CUDA plugin is the whole compiler: it needs no GPU, no driver, no nvcc.
NEWEST := 0.12.0.1
CUDA := jax==$(NEWEST) jaxlib==$(NEWEST) jax-cuda13-plugin==$(NEWEST) jax-cuda13-pjrt==$(NEWEST)
CUDA_FLOOR := $(FLOOR) jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2
# Most of the time is XLA's; files are shared out whole, for the sake of their fixtures.
PYTEST := -m pytest --numprocesses=2 --dist=loadfile
export PYTHON

.PHONY: help demo test test-all test-floor test-kernels lint format venv venv-kernels

help:
	@echo 'make demo        write a conversation at TP=3, continue it at TP=1 and TP=9'
	@echo 'make test        the tests (minutes)'
	@echo 'make test-all    the tests with the long ones; experiments/records/test_all.json'
	@echo 'make test-floor  the tests on the oldest jax that kvmem supports, compiled as users do'
	@echo 'make test-kernels  compile every GPU kernel for an H200, on both jax, without one'
	@echo 'make lint        ruff check and ruff format --check'
	@echo 'make venv        only the set-up, in .venv/'

demo: venv
	.venv/bin/python -m experiments run configs/handoff.toml

test: venv
	.venv/bin/python $(PYTEST)

test-all: venv
	.venv/bin/python $(PYTEST) --long --junitxml=.cache/test_all.xml; found=$$?; \
	.venv/bin/python .ci/record_tests .cache/test_all.xml experiments/records/test_all.json; \
	exit $$found

test-floor:
	@.ci/make_venv .venvs/floor $(FLOOR)
	.venvs/floor/bin/python $(PYTEST) --optimised

venv-kernels:
	@.ci/make_venv .venvs/cuda $(CUDA)
	@.ci/make_venv .venvs/cuda-floor $(CUDA_FLOOR)

test-kernels: venv-kernels
	.venvs/cuda/bin/python -m pytest tests/pallas_kernels --long
	.venvs/cuda-floor/bin/python -m pytest tests/pallas_kernels --long

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: venv
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

venv:
	@.ci/make_venv .venv
