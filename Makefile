# Set-up, demo and tests. All it needs is make and a Python from 3.11 on; everything goes into .venv.
#   make demo       train the tiny model on this machine, in minutes
#   make test       the test suite; make test-slow the runs that train for minutes; make test-all both
#   make lint       ruff and mypy
#   make install    only the set-up; PYTHON=python3.12 picks the interpreter, TORCH=... what to install for torch

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# A machine without an NVIDIA GPU takes this release first, so that no later step pulls in a CUDA build.
TORCH ?= torch==2.13.0
PYTHON ?=

.PHONY: demo lint test test-slow test-all install clean
demo test test-slow: export OMP_NUM_THREADS := 1
demo test test-slow: export MKL_NUM_THREADS := 1

demo: install
	$(VENV)/bin/flowgrpo-ray train configs/tiny_ocr.yaml run.name=demo-$$(date +%Y%m%d-%H%M%S)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: install
	$(PY) -m pytest -m "not slow"

test-slow: install
	$(PY) -m pytest -m slow

test-all: test test-slow

install: $(STAMP)

$(STAMP): pyproject.toml
	@set -e; \
	if [ ! -x $(PY) ]; then \
	  found=""; \
	  for candidate in $(or $(PYTHON),python3.12 python3.11 python3.13 python3 python); do \
	    if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      found=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "error: no Python from 3.11 on with the venv module was found" \
	         "(looked at $(or $(PYTHON),python3.11 to python3.13, python3 and python))." >&2; \
	    echo "Install one (on Debian and Ubuntu its package is called python3-venv)," \
	         "or name it: make install PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) with $$($$found --version) ($$found)"; \
	  $$found -m venv $(VENV); \
	fi; \
	$(PY) -m pip install -qq --upgrade pip; \
	if ! command -v nvidia-smi >/dev/null 2>&1; then \
	  echo "no NVIDIA GPU here: installing $(TORCH)"; \
	  $(PY) -m pip install -qq $(TORCH) || { \
	    echo "error: $(TORCH) could not be installed for $$($(PY) --version); see pip's message above." >&2; \
	    echo "If it has no build for this Python, choose another one: rm -r $(VENV) && make install PYTHON=python3.12" >&2; \
	    echo "Another release or index: make install TORCH='torch==... --index-url https://...'" >&2; \
	    exit 1; }; \
	fi; \
	echo "installing flowgrpo-ray and what it needs (some minutes)"; \
	$(PY) -m pip install -qq -e '.[ocr,dev]'; \
	echo "installing the OCR models (the rapidocr wheel, without the packages that it names)"; \
	$(PY) -m pip install -qq --no-deps rapidocr==3.10.0; \
	echo "installing image-reward (without the older packages that it names and does not need here)"; \
	$(PY) -m pip install -qq --no-deps image-reward==1.5; \
	touch $(STAMP)

clean:
	rm -rf $(VENV)
