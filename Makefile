# make train-1gpu         train ResNet-50 on this machine's GPU, or on the CPU where there is none
# make compare-precision  train the same preset in fp32, TF32, fp16 and bf16: time, memory, speed, accuracy side by side
# make bench-scaling      images/sec on 1, 2, 4 and 8 GPUs of this machine, with plots
# make test               lint, type check and tests, JOBS=2 test files side by side
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

# One for each core, four at most: each takes up to a gigabyte of memory.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))

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

# $(call stage,NAME,COMMAND): says what runs, and how long it took.
stage = printf '== %s\n' "$(1)"; start=$$(date +%s); $(2) && printf '== %s: %d s\n' "$(1)" $$(($$(date +%s) - start))

lint: $(SETUP)
	@$(call stage,ruff,$(PYTHON) -m ruff check)
	@$(call stage,mypy,$(PYTHON) -m mypy)

# A process that dies is not started again: the test that it died of is named, and the others end.
test: lint
	@$(call stage,pytest,$(PYTHON) -m pytest -m "not gpu" -n $(JOBS) --max-worker-restart 0 $(ARGS))

# In one process and in order: the tests share the GPUs.
test-gpu: $(SETUP)
	@$(call stage,pytest on GPUs,$(PYTHON) -m pytest -m gpu -rs $(ARGS))

bench-scaling: $(SETUP)
	@$(PYTHON) benchmarks/scaling.py $(if $(DATA),--data "$(DATA)") $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
