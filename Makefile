# trtforge: `make demo` shows the main job, `make test` proves it. Both set up everything in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := build/clients
KERNELS = $(shell grep -lE 'kernel_levels|level: Native' tests/runtime/test_*.py) tests/runtime/cuda
MEMORY := tests/calibrate/test_memory.py tests/verify/test_memory.py
FAILURES := tests/assault tests/cli/test_interruption.py tests/convert/test_kill.py \
  $(patsubst %,tests/serve/test_%.py,detached gateway_process stopping supervision watching)
# The CPU build where the package index offers one; a range would fetch gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
# A file's tests stay together: many share what is made once. Files come in the order of tests/conftest.py.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

# Bytecode is kept: tests start hundreds of programs, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-failures test-memory test-kernels test-clients test-gpu check coverage bench bench-gpu bench-peers assault soak clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(STAMP) ## Create .venv with the package and all that demo and test need.

# Before gigabytes are installed: pip would refuse another Python after them, and leave a .venv of that Python.
SUPPORTED := import re, sys; about = open("pyproject.toml").read(); \
  low, high = map(int, re.findall(r"^requires-python = .>=3\.(\d+),<3\.(\d+).$$", about, re.M)[0]); \
  sys.exit(None if (3, low) <= sys.version_info[:2] < (3, high) else \
  f"error: $(PYTHON) is Python {sys.version_info[0]}.{sys.version_info[1]}; trtforge needs 3.{low} to 3.{high - 1}\n" \
  f"hint: Name one that is installed: make install PYTHON=python3.{high - 1}")

$(STAMP): pyproject.toml
	@$(PYTHON) -c '$(SUPPORTED)'
	@echo "Installing torch, trtforge and what it needs into $(VENV): 3 GB, a minute or more."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: install ## Build the demo model in INT4-AWQ, serve it with Triton, stream one answer.
	$(BIN)/python recipes/run_demo.py

test: install ## Tests that need no GPU, in three processes, as those with servers mostly wait.
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" $(addprefix --ignore=,$(MEMORY) $(KERNELS) $(FAILURES))

test-failures: install ## Builds and servers that are interrupted, killed, broken, restarted and attacked.
	$(BIN)/python -m pytest $(PARALLEL) $(FAILURES)

test-memory: install ## That calibration and verification of larger models stay within their limits of memory.
	$(BIN)/python -m pytest -n 2 --dist loadfile $(MEMORY)

test-kernels: install ## The CPU kernels with every set of instructions that runs here, the GPU kernels on an interpreter.
	TRTFORGE_TEST_LEVELS=all $(BIN)/python -m pytest $(PARALLEL) -m "not gpu" $(KERNELS)

test-clients: $(CLIENTS)/.installed ## Other projects' clients and test suites against OpenAI's API, in an environment of their own.
	$(CLIENTS)/bin/python -m pytest -o asyncio_mode=auto -o asyncio_default_test_loop_scope=session tests/clients

$(CLIENTS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --editable ".[clients]"
	touch $@

test-gpu: install ## The tests that need a CUDA GPU, in four processes, which mostly compile kernels.
	$(BIN)/python -m pytest -n 4 --dist load -m gpu tests/gpu

check: install ## Lint, types and layering.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for model in model_repo_templates/*/*/model.py; do $(BIN)/mypy $$model || exit 1; done
	$(BIN)/python -m pytest -q tests/test_layering.py

coverage: install ## Branch coverage of the tests, child processes included (half an hour).
	$(BIN)/coverage erase
	TRTFORGE_TEST_LEVELS=all $(BIN)/coverage run -m pytest $(PARALLEL) -q -m "not gpu"
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

bench: install ## Measure the claims of the README.
	$(BIN)/python -m tests.benchmarks

bench-gpu: install ## Measure the embedded engine on a CUDA GPU: random Llamas of 1 to 8 billion parameters.
	$(BIN)/python -m tests.benchmarks gpu

bench-peers: ## Install OpenVINO GenAI and llm-compressor in environments of their own, as peers of `make bench`.
	$(PYTHON) -m venv .venv-openvino
	.venv-openvino/bin/python -m pip install --quiet "$(TORCH)" "openvino-genai>=2026.4" "optimum-intel[openvino]>=2.2"
	.venv-openvino/bin/python -m pip uninstall --quiet --yes torchvision  # the index's may not fit the CPU build of torch
	$(PYTHON) -m venv .venv-llm-compressor
	.venv-llm-compressor/bin/python -m pip install --quiet "$(TORCH)" "llmcompressor==0.14.0.1"

assault: install ## Attack a real server: load, departures, malformed requests, kills, stops, fuzzed builds (hours).
	$(BIN)/python -m tests.assault

soak: install ## An hour of mixed load on a real server; SOAK=SECONDS shortens it.
	$(BIN)/python -m tests.assault soak

clean: ## Remove the virtual environment and everything that was built.
	rm -rf $(VENV) build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
