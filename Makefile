# `make demo` shows the whole path on a generated site; `make test` sets up and runs everything (as root: real Slurm too).
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
PYTEST := $(BIN)/pytest
export PYTHON
# Otherwise each process of a test compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo images test test-all test-unit test-cluster durations lint bench bench-telemetry bench-predictors bench-calibration bench-hooks bench-reports bench-power bench-simulator bench-mig bench-placement bench-packing bench-trial bench-collector bench-watch bench-health mutants docs screenshots deb rpm lock clean distclean servers

help:
	@echo "make demo              the whole path on a generated site (build/demo)"
	@echo "make test              lint and every test; as root it installs and starts real servers"
	@echo "                       (ALMANAC_REQUIRE_CLUSTER=1: in docker too, and nothing may be left out)"
	@echo "make test-all          every test on every release of Slurm, nothing may be left out; takes long, so weekly"
	@echo "make test-unit         tests without servers, but for the slow ones"
	@echo "make test-cluster      tests on a real Slurm, MariaDB and Prometheus (root)"
	@echo "make durations         measures which tests are slow (tests/slow.txt)"
	@echo "make lint              ruff, mypy, import-linter, scripts/house.py (its rules), and tests/slow.txt"
	@echo "make bench             benchmarks; make bench-telemetry, bench-predictors, bench-calibration, bench-reports,"
	@echo "                       bench-power, bench-simulator, bench-mig, bench-placement, bench-packing, bench-trial,"
	@echo "                       bench-collector, bench-watch, bench-health: only those"
	@echo "make bench-hooks       cost of the Slurm hooks on real Slurm (root), of publishing and re-prioritising"
	@echo "make mutants           break 60 random lines, and name those that no test notices (MUTANTS=\"--seed 36 --minutes 30\")"
	@echo "make docs              the generated pages of docs/, and the site of the documentation (build/site)"
	@echo "make screenshots       the pictures of docs/images, from the program on a generated site (chromium)"
	@echo "make deb               the Debian packages slurm-almanac and slurm-almanac-client, for this Debian (build/deb)"
	@echo "make rpm               the same as RPM packages, for this EL release (build/rpm)"
	@echo "make lock              requirements.lock from pyproject.toml"
	@echo "make clean             build outputs and caches; make distclean: the environment too"

# An interrupted or failed installation leaves no stamp; a changed lock installs again.
$(STAMP): requirements.lock pyproject.toml scripts/packages.sh scripts/venv.sh
	scripts/packages.sh python
	scripts/venv.sh $(VENV)
	@touch $@

servers: $(STAMP)
	@scripts/packages.sh servers

demo: $(STAMP)
	$(BIN)/almanac demo --dir build/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py
	$(PYTEST) -q --collect-only --check-durations >/dev/null

# Lint, and the images meanwhile, first: the last line of the output is pytest's summary.
# Five processes for clusters, whose tests mostly wait (tests/conftest.py), and one for the rest on each of two cores.
# With few examples; `make test-all` takes all.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 --output-sync=recurse lint images
	scripts/with-docker.sh $(PYTEST) -n 7 --durations=30 --hypothesis-profile few $(PYTEST_ARGS)

images: servers
	@[ -z "$(ALMANAC_REQUIRE_CLUSTER)$(ALMANAC_SITES)" ] || scripts/with-docker.sh true

# Takes longer than a submission may: weekly, and before a release.
test-all: export ALMANAC_REQUIRE_CLUSTER = 1
test-all: export ALMANAC_EVERY_RELEASE = 1
test-all: lint servers
	scripts/with-docker.sh $(PYTEST) -n 7 --durations=30 --hypothesis-profile almanac $(PYTEST_ARGS)

test-unit: $(STAMP)
	$(PYTEST) -n 2 -m "not cluster and not slow" --hypothesis-profile fewest $(PYTEST_ARGS)

durations: $(STAMP)
	$(PYTEST) -n 2 -m "not cluster" --hypothesis-profile fewest --renew-durations $(PYTEST_ARGS)

test-cluster: servers
	scripts/with-docker.sh $(PYTEST) -m cluster $(PYTEST_ARGS)

# Each prints a table and writes build/bench/NAME.json. A missed figure does not stop the ones after it.
BENCHES = $(patsubst %,$(BIN)/python benchmarks/%.py || missed=1;,$(1)) exit $${missed:-0}

bench: $(STAMP)
	@rm -f build/bench/*.json
	@$(foreach one,telemetry predictors calibration reports power simulator mig placement packing trial collector watch health hooks,$(MAKE) bench-$(one) || missed=1;) \
	$(BIN)/python benchmarks/figures.py && exit $${missed:-0}

bench-telemetry: $(STAMP)
	@$(call BENCHES,telemetry_engine telemetry_import prometheus_ingest scale)

bench-reports: $(STAMP)
	@$(call BENCHES,job_reports report_backlog)

bench-predictors: $(STAMP)
	@$(call BENCHES,predictors pending)

bench-power: $(STAMP)
	@$(call BENCHES,power)

bench-simulator: $(STAMP)
	@$(call BENCHES,simulation rank_choice)

bench-mig: $(STAMP)
	@$(call BENCHES,$(sort $(notdir $(basename $(wildcard benchmarks/mig_*.py)))))

bench-placement: $(STAMP)
	@$(call BENCHES,$(sort $(notdir $(basename $(wildcard benchmarks/placement_*.py)))))

bench-packing: $(STAMP)
	@$(call BENCHES,$(sort $(notdir $(basename $(wildcard benchmarks/packing_*.py)))))

bench-trial: $(STAMP)
	@$(call BENCHES,trial)

bench-collector: $(STAMP)
	@$(call BENCHES,collector)

bench-watch: $(STAMP)
	@$(call BENCHES,watch watch_round)

bench-health: $(STAMP)
	@$(call BENCHES,health)

bench-calibration: $(STAMP)
	@$(call BENCHES,calibration)

# Of the sites that ALMANAC_SITES names, as for test-cluster.
bench-hooks: servers
	@scripts/with-docker.sh $(BIN)/python benchmarks/hooks.py || missed=1; $(call BENCHES,publish reprioritize)

mutants: $(STAMP)
	$(BIN)/python scripts/mutants.py $(MUTANTS)

# --strict fails on a broken link and on a page without a place in mkdocs.yml.
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

screenshots: $(STAMP)
	$(BIN)/python docs/screenshots.py

deb:
	scripts/build-deb.sh build/deb

rpm:
	scripts/build-rpm.sh build/rpm

lock:
	@command -v uv >/dev/null || { echo "make lock needs uv" >&2; exit 1; }
	uv pip compile --universal --generate-hashes --no-emit-index-url --python-version 3.11 --extra dev \
		pyproject.toml -o requirements.lock

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
