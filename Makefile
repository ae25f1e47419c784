# Every target does all the set-up that it needs on a fresh machine with Linux and Python >= 3.11. As root, and where apt-get is,
# that also installs chromium, strace and iproute2 system-wide, if they are missing: see the three variables below.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KILLS ?= 200
MTBF ?= 3
STAGES ?= 1
UPDATE ?= barrier

# A browser for the tests that look at the report. Without one they are skipped; root, apt-get and the network are optional.
BROWSER = command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	&& timeout 60 apt-get -qq update && timeout 180 env DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || echo "no chromium: the tests of the report in a browser will be skipped"

# For the tests that kill a commit at its system calls. Without it they are skipped.
STRACE = command -v strace >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	&& timeout 60 apt-get -qq update && timeout 60 env DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install --yes --no-install-recommends strace; } >/dev/null 2>&1 || echo "no strace: some tests are skipped"

# For the tests with several hosts on one machine. Without iproute2 they are skipped.
HOSTS = { command -v ip && command -v tc; } >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] \
	&& command -v apt-get >/dev/null && timeout 60 apt-get -qq update && timeout 60 env DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install --yes --no-install-recommends iproute2; } >/dev/null 2>&1 || echo "no iproute2: some tests are skipped"

.PHONY: setup demo test test-examples test-long lint docs chaos bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	-@$(BROWSER)
	-@$(STRACE)
	-@$(HOSTS)
	touch $@

demo: setup ## Train three times: undisturbed, a node killed in the update, a node killed in a wait-free backward pass
	$(BIN)/python jobs/demo.py

test: setup ## Two processes for what needs no cluster; a cluster takes the machine for itself
	$(BIN)/python -m pytest tests/unit -m "not long" --numprocesses 2
	$(BIN)/python -m pytest tests/cluster -m "not long" --durations 20

test-examples: setup ## Every code block of the pages that starts something, and every job in jobs/
	$(BIN)/python -m pytest tests/cluster -m example --durations 10

test-long: setup ## What takes minutes: cut cables, drills, scenarios, whole nodes of the kill matrix, autoscaler, job server, notices, metrics
	$(BIN)/python -m pytest tests/unit -m long
	$(BIN)/python -m pytest tests/cluster -m long

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: setup ## The site, in docs/_build/html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs docs/_build/html

chaos: setup ## A seeded campaign of kills: make chaos KILLS=200 MTBF=3 [STAGES=3] [UPDATE=wait_free]
	$(BIN)/python -m raytrain_ft.campaign --kills $(KILLS) --mtbf $(MTBF) --stages $(STAGES) --update $(UPDATE)

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev,bench]"
	mkdir -p build
	for name in step_overhead recovery detection forward goodput undo checkpoint checkfreq pipeline grouping papers; do $(BIN)/python -m benchmarks.$$name --quick --json build/$$name.json || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
