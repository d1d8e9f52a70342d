# Two commands for a stranger: `make demo` and `make test`. Each sets itself up on a machine with Python >= 3.10 and pip.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OUT ?= demo
PIP = $(BIN)/pip --disable-pip-version-check --quiet
READY = $(VENV)/.ready

.PHONY: demo test chaos fuzz test-quick server-0.5.14 lint format clean

demo: $(READY) ## the whole way on a real model: serve, answer, capture, verify, load, train, evaluate
	$(BIN)/eagle3-data demo --out $(OUT)

test: $(READY) ## all tests, the real SGLang server on the CPU included
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-quick: $(READY) ## without the server
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not server"

fuzz: $(READY) ## damage shards for SECONDS (default 60), and look for one that is believed
	$(BIN)/python -m tests.shards.test_hostile $(SECONDS)

chaos: $(READY) ## 200 random kills of builder and server, invariants checked after each
	$(BIN)/python -m tests.chaos --kills 200

lint: $(READY) ## ruff, and mypy --strict on the package as it is installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck
	$(PIP) install --no-deps --target build/typecheck .
	cd build/typecheck && ../../$(BIN)/python -m mypy --config-file ../../pyproject.toml -p eagle3_data

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml $(wildcard requirements/*.txt)
	@echo "setting up $(VENV): about 3 GB of packages on disk, once"
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Python 3.10 or newer is needed')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements/sglang-cpu.txt -r requirements/tools.txt
	$(PIP) install --no-deps -r requirements/nodeps.txt
	$(PIP) install --no-deps -e .
	@touch $(READY)

clean:
	rm -rf $(VENV) build demo *.egg-info
