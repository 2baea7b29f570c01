# make venv    the environment, from the locked versions
# make train   the main job: the MoE recipe on 2 ranks
# make test    format, lint and type checks, then the tests, in 15 minutes on 2 cores
# make slow    the tests that train or measure for many seconds
# make check   the checks without the tests
# make test-long  ten times as many random plans, layouts and options; LONG=100 is another number
# make oldest  the core tests on the oldest PyTorch that is supported, in an environment of its own
# make newest  the test suite on the newest PyTorch, in an environment of its own; TORCH=2.14.1 is another one
# make integrations  the examples in Transformers, TRL, Accelerate, Lightning, PEFT and Megatron-FSDP, in an environment of its own
# make lm-eval  exports to Hugging Face, and lm-eval on one, in an environment of its own
# make gpu     CALL=1, 2, 3 or 4: what is measured on one GPU, at most 8 minutes each; DEVICE=cpu rehearses it
# make gpu-wheels  packages for make gpu on a machine without a network, in .cache/wheels
# make soak    2,000 steps twice, undisturbed and with random kills: the same digits; at most an hour
# make wheel   the wheel in .cache/wheel, installed in an environment of its own, where it plans and trains outside of the checkout
# make site    README and docs as a searchable site in site/; a dead link fails
# make kernels the GPU kernels without a GPU: numerics under Triton's interpreter, and what they compile to, as a table

PYTHON ?= python3
# The tested version, unless PYTHON is given or the version is not there.
python = $(if $(filter file,$(origin PYTHON)),$(shell python$(1) -c '' 2> /dev/null && echo python$(1) || echo $(PYTHON)),$(PYTHON))
VENV := .venv
BIN := $(VENV)/bin
# Beside the environment, since TorchTitan imports other things where it finds Triton. The version is what torch 2.13 asks for.
TRITON := triton==3.7.1
TRITON_FOLDER := .cache/triton
STAMP := $(VENV)/.installed
NEWEST := .venv-newest
NEWEST_LOCK := constraints-newest.txt
NEWEST_TORCH := $(shell sed -n 's/^torch==//p' $(NEWEST_LOCK))
TORCH ?= $(NEWEST_TORCH)
NEWEST_STAMP := $(NEWEST)/.installed-$(TORCH)
OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.installed
OLDEST_LOCK := constraints-oldest.txt
OLDEST_TESTS := $(addprefix tests/unit/,plan step orthogonalize features comm owned fsdp) tests/unit/test_hybrid*.py \
	tests/unit/titan/test_compat.py tests/conformance tests/parity tests/dist/step tests/dist/owned tests/dist/features
# TORCH=2.15.0 has pipeline and context parallelism too.
INTEGRATIONS := .venv-integrations
INTEGRATIONS_STAMP := $(INTEGRATIONS)/.installed
NPROC ?= 2
# Three tests at a time on two cores, because many wait. A worker takes neighbouring tests, so that a module's fixture is mostly made once.
WORKERS ?= -n 3 --dist worksteal
CONFIG ?= configs/qwen_moe_muon.toml
ARGS ?=
LONG ?= 10
# An interpreter with a PyTorch that fits the GPU's driver; by default the first of these with any.
PYTHON_GPU ?= $(firstword $(foreach name,$(PYTHON) $(BIN)/python $(NEWEST)/bin/python,$(shell $(name) -c 'import torch' 2> /dev/null && echo $(name))))
CALL ?=
DEVICE ?= cuda
# What an image with PyTorch often lacks, and the Python of that image.
WHEELS := .cache/wheels
WHEEL_NAMES := torchtitan|datasets|tyro|multiprocess|spmd_types|dill|torchdata|docstring_parser|typeguard|einops|tokenizers
# The peers of call 2. quack-kernels needs nvidia-cutlass-dsl-libs-base too, of 75 MB: PEERS="... nvidia-cutlass-dsl-libs-base==4.5.2".
PEERS ?= gram-newton-schulz==0.1.6 quack-kernels==0.5.0 nvidia-cutlass-dsl==4.5.2 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext emerging-optimizers==0.3.0 absl-py
WHEEL_PYTHON ?= 3.12

# An environment: $(call create,version,folder)
define create
$(call python,$(1)) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=..."'
$(call python,$(1)) -m venv $(2)
endef

.PHONY: lm-eval site wheel soak venv train test suite slow test-long check lint types newest oldest gpu gpu-wheels kernels lock lock-oldest lock-newest clean integrations

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(call create,3.11,$(VENV))
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[titan,dev,zoo]'
	# pip compiles on one core, and the tests of all packages too. Some files need a newer Python.
	$(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true
	touch $@

train: venv
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc_per_node=$(NPROC) train.py --config $(CONFIG) $(ARGS)

soak: venv
	TITAN_MUON_SOAK_STEPS=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 3600 tests/dist/titan/test_train_py.py -k "random and one" $(ARGS)

check: lint types

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: venv
	$(BIN)/mypy

# Type checks beside the tests, which often wait.
test: lint
	$(MAKE) --no-print-directory -j 2 types suite

# Many tests start processes, and each would compile this project where PYTHONDONTWRITEBYTECODE is set.
suite: venv
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(WORKERS) -m "not slow" $(ARGS)

slow: venv
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(WORKERS) -m slow $(ARGS)

test-long: venv
	OMP_NUM_THREADS=1 TITAN_MUON_LONG=$(LONG) $(BIN)/python -m pytest --timeout 0 $(WORKERS) tests/unit/plan tests/parity/test_parity.py::test_random_rows_have_the_bits_of_the_reference $(ARGS)

oldest: $(OLDEST_STAMP)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(OLDEST)/bin/python -m pytest $(WORKERS) -m "not slow" $(OLDEST_TESTS) $(ARGS)

$(OLDEST_STAMP): pyproject.toml $(OLDEST_LOCK)
	$(call create,3.12,$(OLDEST))
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c $(OLDEST_LOCK) torch -e '.[titan,dev]'
	touch $@

newest: $(NEWEST_STAMP)
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(WORKERS) $(ARGS)

integrations: $(INTEGRATIONS_STAMP)
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest tests/integrations $(ARGS)

# An environment of its own, because lm-eval needs many packages and examples/ newer ones than TorchTitan takes.
lm-eval: .venv-lm-eval/.installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-lm-eval/bin/python -m pytest tests/unit/titan/run/test_export.py $(ARGS)

.venv-lm-eval/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[titan,zoo]' 'lm-eval[hf]==0.4.13' pytest pytest-timeout
	touch $@

$(INTEGRATIONS_STAMP): pyproject.toml constraints-integrations.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check -c constraints-integrations.txt -e '.[integrations]'
	# Alone, because timm's schedulers do not need torchvision, and pip has no torchvision for a PyTorch without CUDA.
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check --no-deps timm==1.0.31
	touch $@

# Every version of torch pins CUDA packages and a Triton of its own, so for another than the locked one these are free.
$(NEWEST_STAMP): pyproject.toml $(NEWEST_LOCK)
	$(call create,3.13,$(NEWEST))
	rm -f $(NEWEST)/.installed-*
	grep -vE '$(if $(filter $(NEWEST_TORCH),$(TORCH)),^$$,^(torch|triton|cuda-.*|nvidia-.*)==)' $(NEWEST_LOCK) > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check -c $(NEWEST)/constraints.txt torch==$(TORCH) -e '.[titan,dev,zoo]'
	touch $@

gpu:
	$(if $(wildcard $(WHEELS)/*.whl),$(PYTHON_GPU) -m pip install -q --no-index --no-deps --upgrade --target $(WHEELS)/site $(WHEELS)/*.whl)
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(WHEELS)/site:$(CURDIR)/$(WHEELS)/dion:$$PYTHONPATH OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 \
		PYTORCH_ALLOC_CONF=expandable_segments:True $(PYTHON_GPU) -m benchmarks.gpu $(addprefix --call ,$(CALL)) --device $(DEVICE) $(ARGS)

# dion is on no index: put a copy of its repository into .cache/wheels/dion.
gpu-wheels:
	rm -rf $(WHEELS)/*.whl $(WHEELS)/site
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version $(WHEEL_PYTHON) \
		$(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64) \
		--dest $(WHEELS) $$(grep -E '^($(WHEEL_NAMES))==' constraints.txt) $(PEERS)
	du -sh $(WHEELS)/*

kernels: venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(TRITON_FOLDER) $(TRITON)
	PYTHONPATH=$(TRITON_FOLDER) $(BIN)/python -m pytest tests/unit/orthogonalize/test_newton_schulz.py -k 'kernel or products or tile'
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON_FOLDER) $(BIN)/python -m pytest tests/unit/features/test_fused.py tests/unit/features/test_graph_replay.py tests/unit/features/test_features.py -k 'fused or graph'
	PYTHONPATH=$(TRITON_FOLDER) $(BIN)/python benchmarks/compile_kernels.py

# Without the lock: what a user gets who installs the wheel.
wheel:
	$(PYTHON) -m venv --clear .venv-wheel
	rm -rf .cache/wheel
	.venv-wheel/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir .cache/wheel .
	.venv-wheel/bin/pip install --quiet --disable-pip-version-check torch==$(TITAN_TORCH) "$$(ls $(CURDIR)/.cache/wheel/*.whl)[titan]"
	cd .cache/wheel && $(CURDIR)/.venv-wheel/bin/titan-muon plan --config qwen_moe_muon --world-size 2
	cd .cache/wheel && $(CURDIR)/.venv-wheel/bin/titan-muon train --config qwen_moe_muon --training.steps 5

# From the committed files, so that links from docs to examples and sources hold.
site:
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/pip install --quiet --disable-pip-version-check mkdocs==1.6.1
	rm -rf .cache/site site
	mkdir -p .cache/site
	git archive HEAD '*.md' docs examples configs models benchmarks scripts titan_muon tests Makefile LICENSE train.py | tar -x -C .cache/site
	.venv-site/bin/mkdocs build --strict

# Every package of the environment at the version it has now. Run it only to move the lock on purpose.
lock:
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

lock-oldest:
	$(OLDEST)/bin/pip freeze --exclude-editable | sed 's/+[a-z0-9]*$$//' > $(OLDEST_LOCK)

lock-newest:
	$(NEWEST)/bin/pip freeze --exclude-editable | sed 's/+cu[0-9]*$$//' > $(NEWEST_LOCK)

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(TITAN_ENV) $(INTEGRATIONS) .venv-lm-eval .venv-site .venv-wheel site .pytest_cache .mypy_cache .ruff_cache .hypothesis
