# make train-1gpu         train ResNet-50 on this machine's GPU, or on the CPU where there is none
# make compare-precision  train the same preset in fp32, TF32, fp16 and bf16: time, memory, speed, accuracy side by side
# make compare-resnets    ResNet-18 to 152 on CIFAR-100 (or DATA=...), in full (fp32) and mixed (fp16) precision, one table
# make gpu-report         what this GPU can do: kernels, training, inference, cost, in < 10 minutes; ARGS="--compare ..."
# make bench-scaling      images/sec on 1, 2, 4 and 8 GPUs of this machine, with plots
# make test               lint, type check and all tests that are not long, JOBS=2 test files side by side, shuffled
# make test-long          all long tests; make test-all: both kinds, which is everything that needs no GPU
# make check              ruff, mypy and the tests of files changed since main, or SINCE=COMMIT, in a minute
# make test-gpu           the tests that need a GPU: GPU_JOBS=12 in parallel, then the ones that need the GPU alone
# make test-emulated      the GPU tests of plain kernels on an emulated GPU, for hours (docs/extending.md)
# make sanitize           compute-sanitizer (of the CUDA toolkit) over every kernel: memory, races, barriers
# make test-faults        kills, stops, full disks, lost files at random moments, TRIES=20 of each (docs/reliability.md)
# make setup              only set up .venv, with everything for the commands above; make clean removes it
#
# Each command first sets up .venv as needed. PYTHON=/path/to/python uses another environment and sets nothing up.
# DATA=/path              train on your own data: folders of classes, RecordIO and others (docs/data.md)
# ARGS="--epochs 5 ..."   further options: .venv/bin/python -m train train --help lists them

ifdef PYTHON
else
PYTHON := .venv/bin/python
RUN := .venv/.ready
TOOLS := .venv/.ready-test
HOROVOD := .venv/.ready-horovod
# If the system's Python was upgraded or removed, .venv no longer finds its packages and is set up again.
$(if $(wildcard .venv/.ready),$(shell .venv/bin/python -c 'import pip' >/dev/null 2>&1 || rm -f .venv/.ready*))
endif

# One test process per core, at most four: each needs up to a gigabyte of memory.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
# A test process on a GPU needs a core, and up to ten gigabytes of the GPU's memory.
GPU_JOBS ?= $(shell cores=$$(nproc); mib=$$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>&- | head -1); \
	printf '%s\n' 12 $$cores $$(($${mib:-120000} / 10000)) | sort -n | head -1)

.PHONY: help setup train-1gpu compare-precision compare-resnets gpu-report bench-scaling lint test test-long test-all check \
	test-gpu test-faults test-emulated sanitize clean

help:
	@sed -n '/^$$/q; s/^# \?//p' Makefile

setup:
	@sh scripts/setup.sh

.venv/.ready .venv/.ready-test: pyproject.toml common/mxnet_hook.pth common/mxnet_hook.py scripts/setup.sh scripts/link_cuda11.py
	@sh scripts/setup.sh $(if $(findstring test,$@),test,run)

.venv/.ready-horovod: scripts/setup.sh scripts/build_horovod.py train/processes/allreduce.cc
	@sh scripts/setup.sh horovod

train-1gpu: $(RUN)
	@$(PYTHON) -m train $(if $(DATA),--data "$(DATA)") $(ARGS)

compare-precision: $(RUN)
	@$(PYTHON) -m train compare-precision $(if $(DATA),--data "$(DATA)") $(ARGS)

compare-resnets: $(RUN)
	@$(PYTHON) -m train compare-precision --config cifar100_resnet18 --models resnet --precisions float32 float16 \
		$(if $(DATA),--data "$(DATA)") $(ARGS)

gpu-report: $(RUN)
	@$(PYTHON) -m train gpu-report $(if $(DATA),--data "$(DATA)") $(ARGS)

# $(call stage,NAME,COMMAND) runs a command, and prints its name and duration.
stage = printf '== %s\n' "$(1)"; start=$$(date +%s); $(2) && printf '== %s: %d s\n' "$(1)" $$(($$(date +%s) - start))

lint: $(TOOLS)
	@$(call stage,ruff,$(PYTHON) -m ruff check)
	@$(call stage,mypy,$(PYTHON) -m mypy)

# A test process that dies is not restarted: pytest names the test that killed it, and stops.
tests = $(PYTHON) -m pytest -m "not gpu and not slow$(1)" -n $(JOBS) --max-worker-restart 0 $(ARGS)

test: lint $(HOROVOD)
	@$(call stage,pytest,$(call tests, and not long))

test-long: $(TOOLS) $(HOROVOD)
	@$(call stage,pytest of long tests,$(call tests, and long))

test-all: lint $(HOROVOD)
	@$(call stage,pytest of all tests,$(call tests,))

check: $(TOOLS) $(HOROVOD)
	@$(call stage,check,$(PYTHON) tests/changed.py $(if $(SINCE),--since "$(SINCE)") -n 1 $(ARGS))

# Tests are distributed one by one, not by file, because a few files have most of them. The second stage runs even if
# tests of the first one fail. If ARGS names files of one stage only, the other has no tests, and pytest exits with 5.
test-gpu: $(TOOLS) $(HOROVOD)
	@$(call stage,pytest on GPUs,{ $(PYTHON) -m pytest -m "gpu and not alone" -n $(GPU_JOBS) --dist worksteal $(ARGS) || test $$? = 5; }); \
	 side_by_side=$$?; \
	 $(call stage,pytest alone on GPUs,{ $(PYTHON) -m pytest -m "gpu and alone" -rs $(ARGS) || test $$? = 5; }) && exit $$side_by_side

test-faults: $(TOOLS) $(HOROVOD)
	@$(call stage,faults,RESNET_FAULT_TRIES=$(or $(TRIES),20) $(PYTHON) -m pytest tests/faults $(ARGS))

test-emulated: $(TOOLS)
	@$(call stage,kernels on an emulated GPU,$(PYTHON) -m pytest tests/graph_passes/cuda/test_emulated_kernels.py -n $(JOBS) $(ARGS))

sanitize: $(TOOLS)
	@$(call stage,compute-sanitizer,$(PYTHON) -m pytest -m gpu -rs tests/graph_passes/cuda/test_sanitizer.py $(ARGS))

bench-scaling: $(RUN) $(HOROVOD)
	@$(PYTHON) benchmarks/scaling.py $(if $(DATA),--data "$(DATA)") $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
