# make demo | make test need nothing installed but Python (3.10 or newer) and make: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
CHROMIUM ?= chromium
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-fast test-browser test-comfyui test-compat check format test-gpu bench docs dist clean

# OMP_WAIT_POLICY: waiting threads sleep. If another process keeps one of two cores busy, spinning ones are ten times slower.
demo: $(VENV)/installed-lab ## make images with the demo model, as it is and faster, and compare them
	OMP_WAIT_POLICY=passive $(BIN)/toma demo --fresh --output demo

# worksteal: tests of one file stay together, so that what they share is made in one process only.
test: $(VENV)/installed-dev ## the tests that need no GPU
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not gpu"

test-fast: $(VENV)/installed-dev ## without those that kill, resume, train, wait for turns or compile long
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not gpu and not slow"

check: $(VENV)/installed-dev ## lint, format, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest --quiet tests/test_imports.py tests/test_packaging.py

format: $(VENV)/installed-dev ## put the code into the form that check asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-compat: .venv-compat/installed ## the tests of the seam, with the oldest diffusers that pyproject.toml allows
	.venv-compat/bin/python -m pytest --numprocesses 2 --dist worksteal -m "not gpu" tests/engine tests/families tests/skip

test-browser: $(VENV)/installed-dev ## the playground in a real browser; CHROMIUM=google-chrome for another one
	TOMA_BROWSER=$(CHROMIUM) $(BIN)/python -m pytest lab/tests/playground

test-comfyui: .venv-comfyui/installed ## the ComfyUI nodes, with the ComfyUI in the folder COMFYUI=path
	@test -d "$(COMFYUI)/comfy" || { echo "usage: make test-comfyui COMFYUI=path (a checkout of ComfyUI)"; exit 1; }
	TOMA_COMFYUI="$(abspath $(COMFYUI))" .venv-comfyui/bin/python -m pytest tests/comfyui

test-gpu: $(VENV)/installed-dev ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

bench: $(VENV)/installed-dev ## time the operators and denoisers on this machine, into benchmarks/results/local/
	for op in facility_location weights merge; do $(BIN)/python benchmarks/bench_$$op.py || exit 1; done
	$(BIN)/toma bench --model sdxl --output benchmarks/results/local/denoiser.csv
	$(BIN)/toma bench --model flux --output benchmarks/results/local/denoiser.csv

docs: $(VENV)/installed-dev ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/installed-release ## wheels and source archives of the distributions, checked
	rm -rf dist
	for project in . lab demo-model; do $(BIN)/python -m build --outdir dist $$project || exit 1; done
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) .venv-compat .venv-comfyui demo dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/installed-%: pyproject.toml lab/pyproject.toml demo-model/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable ".[$*]" --editable ./lab --editable ./demo-model # the library first: the others require it
	@touch $@

.venv-compat/installed: pyproject.toml constraints-compat.txt
	$(PYTHON) -m venv .venv-compat
	.venv-compat/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-compat.txt \
		--editable . --editable ./lab hypothesis peft pytest pytest-xdist
	@touch $@

# What the parts of ComfyUI need that these tests import. Without torchvision and torchaudio stand-ins are used.
.venv-comfyui/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-comfyui
	.venv-comfyui/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable . av einops hypothesis psutil pydantic-settings pytest pyyaml scipy torchsde
	@touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
