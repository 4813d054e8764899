# make train-1gpu         train ResNet-50 on this machine's GPU, or on the CPU where there is none
# make compare-precision  train the same preset in fp32, TF32, fp16 and bf16: time, memory, speed, accuracy side by side
# make bench-scaling      images/sec on 1, 2, 4 and 8 GPUs of this machine, with plots
# make test               lint, type check and tests
# make test-gpu           the tests that need a GPU
# make setup              .venv alone; make clean removes it
#
# All of them set up .venv first. PYTHON=/path/to/python uses that environment as it is and sets nothing up.
# DATA=/path              train on your own data: folders of classes, RecordIO and others (docs/data.md)
# ARGS="--epochs 5 ..."   further options: .venv/bin/python -m train train --help lists them

ifdef PYTHON
SETUP :=
else
PYTHON := .venv/bin/python
SETUP := .venv/.ready
endif

.PHONY: help setup train-1gpu compare-precision bench-scaling lint test test-gpu clean

help:
	@sed -n '/^$$/q; s/^# \?//p' Makefile

setup:
	@bash scripts/setup.sh

.venv/.ready: pyproject.toml scripts/setup.sh train/allreduce.cc
	@bash scripts/setup.sh

train-1gpu: $(SETUP)
	@$(PYTHON) -m train $(if $(DATA),--data "$(DATA)") $(ARGS)

compare-precision: $(SETUP)
	@$(PYTHON) -m train compare-precision $(if $(DATA),--data "$(DATA)") $(ARGS)

lint: $(SETUP)
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m mypy

test: lint
	@$(PYTHON) -m pytest -m "not gpu" $(ARGS)

test-gpu: $(SETUP)
	@$(PYTHON) -m pytest -m gpu -rs $(ARGS)

bench-scaling: $(SETUP)
	@$(PYTHON) benchmarks/scaling.py $(if $(DATA),--data "$(DATA)") $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
