# Each target does all its own set-up: it needs Python 3.11 or newer, make and git, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-thorough lint format bench bench-deploy kills soak docs docs-serve clean

demo: $(READY)            ## Fit the six-cities model over two silos and compare with NUTS
	$(BIN)/sfvi demo

test: $(READY)            ## Run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not deployed and not thorough"
	$(BIN)/python -m pytest -n 2 --dist loadfile -m deployed

test-thorough: $(READY)   ## Run the long tests that `make test` leaves out
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough

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

bench-deploy: $(READY)    ## Measure deployed runs, on this machine with TLS; writes benchmarks/DEPLOY.md (about an hour)
	$(BIN)/python -m benchmarks.deploy

kills: $(READY)           ## Kill 20 random processes of a deployed federation; no digit may change (about 15 minutes)
	$(BIN)/python -m tests.deploy.kills --kills 20 --seed 0

soak: $(READY)            ## The same with 100 kills (about an hour)
	$(BIN)/python -m tests.deploy.kills --kills 100 --seed 1

docs: $(READY)            ## Build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(READY)      ## The same, served and rebuilt when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "sfvi needs Python 3.11 or newer; try make PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
