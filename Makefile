.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo

WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10
HIDDEN := bad_input or frames
ANNOTATIONS := --jaxtyping-packages=lightning_bnn,weightsym,weightsym_fast,bnn_research,beartype.beartype

# Modules that hardly any process imports, and that the first one compiles if it does
SELDOM := /(tests?|pip|setuptools|_vendor|physics|_inductor|onnx|testing|pygments/lexers|fontTools|pytorch_lightning|lightning_fabric|grpc|aiohttp|werkzeug|torchgen)/

# Images of containers often forbid what all processes of tests would otherwise compile again.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: help demo docs test test-all check bench gpu oldest loggers peers clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "make %-9s %s\n", $$1, $$2}'

define install
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable ./weightsym --editable ./fast --editable $(1)
	$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true
endef

$(STAMP): pyproject.toml weightsym/pyproject.toml fast/pyproject.toml bnn-data/pyproject.toml research/pyproject.toml
	$(call install,'.[dev]' --editable ./bnn-data --editable ./research)
	touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml weightsym/pyproject.toml fast/pyproject.toml
	$(call install,'.[fast]' 'scikit-learn>=1.3')
	touch $(DEMO_STAMP)

demo: $(DEMO_STAMP)  ## install what it needs into .venv, compare seven posteriors, write demo/report.html
	$(BIN)/lightning-bnn demo

test: $(STAMP)  ## install into .venv and run the tests, on WORKERS=2 processes
	$(PYTEST)

test-all: $(STAMP)  ## the tests with annotations and shapes checked, those that start processes, too
	read=$$(mktemp -d) && trap 'rm -r "$$read"' EXIT && export LIGHTNING_BNN_SYMMETRIES="$$read" && \
	$(PYTEST) -m 'not ($(HIDDEN) or e2e or slow)' $(ANNOTATIONS) && \
	$(PYTEST) -m '($(HIDDEN) or e2e) and not slow' tests

check: $(STAMP)  ## style, layers and static types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(STAMP)  ## large networks, and all that is timed, into docs/benchmarks; ONLY=name, AGAIN=1
	$(BIN)/python -m pip install --quiet rebasin==0.0.47 torch-uncertainty==0.13.0
	$(BIN)/python -m pip install --quiet --no-deps blitz-bayesian-pytorch==0.2.8 bayesian-torch==0.5.0 posteriors==0.1.3 optree==0.20.0 tensordict==0.15.3 torchopt==0.7.3 pyvers==0.2.3 numba==0.68.1
	$(BIN)/python -m pip install --quiet jax==0.10.2 blackjax==1.7.1
	$(if $(ONLY),,$(BIN)/python -m pytest -m slow)
	$(BIN)/python benchmarks/bench.py $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again)

gpu: $(STAMP)  ## tests and times on the GPU of this machine, into docs/benchmarks
	LIGHTNING_BNN_DEVICE=cuda $(BIN)/python -m pytest -m e2e -q --tb=short tests/test_another_device.py tests/fast/test_graphs.py
	$(BIN)/python benchmarks/gpu_populations.py --device cuda --sizes 1 100 10000 100000 --repeats 2 --record docs/benchmarks/gpu_populations.json
	$(BIN)/python benchmarks/tables.py

oldest:  ## the lowest versions that pyproject.toml allows, in an environment of their own; PYTHONS="python3.10 python3.13"
	.ci/oldest $(PYTHONS)

loggers:  ## callbacks with Weights & Biases, MLflow and Comet, in an environment of their own
	.ci/others loggers

peers:  ## all packages of docs/peers.md and ours in one environment of their own; needs Python 3.13
	.ci/others peers

docs: $(STAMP)  ## build the site into site/; a broken link fails
	$(BIN)/python -m pip install --quiet --editable ./weightsym --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
