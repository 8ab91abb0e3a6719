# Everything a newcomer, a reader or a maintainer runs. `make demo` and `make test` need Python 3.10+ and nothing else.
PYTHON ?= python3
BIN    := .venv/bin
# Notebooks run with quiet libraries, so that their saved outputs hold results only.
QUIET  := HF_HUB_DISABLE_PROGRESS_BARS=1 HF_HUB_DISABLE_TELEMETRY=1 TRANSFORMERS_VERBOSITY=error TQDM_DISABLE=1
# `ci`: what must hold. `nightly`: also the tests marked slow, and all of hypothesis' examples.
TIER ?= ci
CHOSEN := $(if $(filter nightly,$(TIER)),,-m "not slow")
# Two processes share two cores, so each has one thread; where a test asks for more, those that wait don't spin.
TESTING := SPECDEC_TESTS=$(TIER) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(QUIET)
NOTEBOOKS ?= $(sort $(wildcard nbs/*.ipynb nbs/*/*.ipynb))

.PHONY: demo test test-package pages pages-waiting pages-working pages-unnumbered test-all setup model browser check check-site check-code \
        check-texts notebooks badges record figures mutation gpu-rehearsal docs readme lab clean

demo: setup model           ## answer a prompt by plain and by speculative decoding, side by side
	$(BIN)/specdec compare --dtype float32 "Write a Python class Stack with the methods push, pop and peek, and show how to use it."

test: setup                 ## what decodes: lint, types, and every distribution, rule and drafter; a quarter of an hour on two cores
	$(MAKE) --no-print-directory --jobs 2 check-code test-package

test-package: model         # what stands in tests/ itself, not in its folders
	$(TESTING) $(BIN)/python -m pytest $(CHOSEN) -n 2 --dist worksteal --durations 40 --durations-min 3 tests/test_*.py

pages: setup                ## what stands round it: commands, processors, training, benchmarks, notebooks, site, browsers; after `make test`
	$(MAKE) --no-print-directory --jobs 3 pages-waiting pages-working
	$(TESTING) $(BIN)/python -m pytest $(CHOSEN) tests/pages/alone

# In one process beside all others: tests that mostly wait for other processes to end, and those that share a browser's
# one pass over the pages. Those of tests/pages/alone ask how soon a click is answered, and come last.
pages-waiting: model
	$(TESTING) $(BIN)/python -m pytest -p no:cacheprovider $(CHOSEN) tests/pages/waiting

pages-working: check-site check-texts pages-unnumbered
	$(TESTING) $(BIN)/python -m pytest $(CHOSEN) -n 2 --dist worksteal --durations 40 --durations-min 3 \
	  tests/app tests/machines tests/bench tests/train tests/pages --ignore tests/pages/waiting --ignore tests/pages/alone

pages-unnumbered: model     # the notebooks without a number; those with one are run with their solutions, by pytest
	$(TESTING) $(BIN)/nbdev_test --n_workers 1 --timing --skip_file_re '^[0-9_.]'

test-all:                   ## both, with every case, long statistics and long measurements
	$(MAKE) --no-print-directory test pages TIER=nightly

browser:                    ## a Chromium for the browser tests, from the system's packages where they have one
	@for name in chromium chromium-browser google-chrome "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; \
	do command -v "$$name" && exit; done; \
	root=; test "$$(id -u)" = 0 || root=sudo; \
	if command -v apt-get >/dev/null; then $$root apt-get update -qq && $$root apt-get install -y -qq chromium; \
	elif command -v dnf >/dev/null; then $$root dnf install -y chromium; \
	elif command -v pacman >/dev/null; then $$root pacman -S --noconfirm chromium; \
	elif command -v brew >/dev/null; then brew install --cask google-chrome; \
	else echo "No package manager that I know: install Chromium or Chrome yourself, or go without (the browser tests are then skipped)."; exit 1; fi

check: check-site check-code check-texts  ## lint and types; notebooks, package, README and site agree

check-site: setup           # the longest first, so that `make --jobs 2` has two halves
	$(BIN)/python tools/check_site.py

check-code: setup           # each of these runs here only: no test asks them again
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/mutation.py --check
	$(BIN)/python tools/check_export.py

check-texts: setup
	$(BIN)/python tools/reading.py --check
	$(BIN)/python tools/figures.py --check
	$(BIN)/python tools/badges.py --check
	$(BIN)/python tools/readme.py --check

setup: .venv/ready
.venv/ready: settings.ini setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

model: setup                ## the default model, fetched and converted once
	$(BIN)/specdec fetch

notebooks: setup model      ## run every notebook top to bottom on a clean kernel and save its outputs
	for notebook in $(NOTEBOOKS); do echo $$notebook; \
	  $(QUIET) $(BIN)/jupyter nbconvert --log-level WARN --to notebook --execute --inplace \
	  --ExecutePreprocessor.timeout=900 --ExecutePreprocessor.store_widget_state=False $$notebook || exit 1; done
	$(BIN)/nbdev_clean

badges: setup               ## what every notebook has besides its own cells: title, badge, install cell, kernel, folds
	$(BIN)/python tools/badges.py

record: setup model         ## the runs of the page to step through, their averages, and the picture that stands in for them
	$(BIN)/python tools/record.py
	$(BIN)/python tools/pictures.py recorded round round-still

figures: setup model        ## every figure that a page quotes, measured anew; an hour on a machine that does nothing else
	$(BIN)/python tools/figures.py

mutation: setup model       ## change what decodes in small ways, and count what the tests notice; half an hour
	$(BIN)/python -m pip install --quiet "cosmic-ray>=8.4,<9"
	$(BIN)/python tools/mutation.py

gpu-rehearsal: setup        ## what would run on a GPU for a quarter of an hour, on a CPU, in an environment like the one there
	$(BIN)/python tools/gpu_rehearsal.py

docs: setup                 ## render the notebooks into docs/
	$(BIN)/python tools/site.py

readme: setup               ## README.md from nbs/index.ipynb
	$(BIN)/python tools/readme.py

lab: setup model            ## open the notebooks
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) nbs

clean:                      ## what can be made again
	rm -rf .venv _proc build *.egg-info
