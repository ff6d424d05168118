# Each target does all its own set-up: it needs Python 3.11 or newer, make and git, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint format bench clean

demo: $(READY)            ## Fit the six-cities model over two silos and compare with NUTS
	$(BIN)/sfvi demo

test: $(READY)            ## Run the tests
	$(BIN)/python -m pytest -n 2

lint: $(READY)            ## Format check, linters, types, direction of dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(READY)          ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)           ## Measure against a hand-written loop and numpyro.infer.SVI; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "sfvi needs Python 3.11 or newer; try make PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
