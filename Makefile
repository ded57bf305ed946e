# Every target does its own set-up, may be run twice, and rebuilds only what has changed.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
TRACE ?= traces/llama-3-8b-alpacaeval.parquet
TRAIN ?= traces/llama-2-70b-flask.parquet
READOUT ?= traces/readout.safetensors
MODEL ?= .cache/vllm-tests/real
LOAD ?= 1.2
# A card whose KV cache is what is short, as on most cards that people have. The committed trace is short against the engine:
# replayed once, it would only fill and drain it.
REPLAY_ARGS ?= --engine rtx4090-llama-8b --num-prompts 5000
GRID_ARGS ?=
PYTEST_ARGS ?=
SOAK_ARGS ?=
WORKERS ?= 2
RANDOM := test_vllm_scenarios.py test_vllm_replay.py
# The release profile shares its dependencies with the extension module: half the time of a cold build in the dev profile.
CARGO_TEST ?= --release

VENV := $(CURDIR)/.venv
export VIRTUAL_ENV := $(VENV)
export PIP_QUIET := 1
export PATH := $(VENV)/bin:$(PATH)

SETUP := .venv/.setup
VENV_VLLM := $(CURDIR)/.venv-vllm
SETUP_VLLM := .venv-vllm/.setup
PLUGIN := .venv-vllm/.plugin
EXTENSION := python/leap_rs/_leap.abi3.so
WHEEL := dist/.built
# Where targets run beside each other, a recipe that is no make of its own gets flags of a job server that it cannot reach.
CARGO := env -u MAKEFLAGS -u MFLAGS cargo
MATURIN := env -u MAKEFLAGS -u MFLAGS maturin
# For a wheel maturin repairs cargo's own file in place, and can then neither repair nor install it: after a wheel cargo has
# to link it anew.
UNLINK := rm -f target/maturin/*.so target/release/lib_leap.so target/release/deps/lib_leap.so
RUST := $(shell find crates -name '*.rs' -not -path '*/tests/*' -not -path '*/benches/*') \
	$(wildcard crates/*/Cargo.toml) Cargo.toml Cargo.lock
FACE := $(shell find python -name '*.py' -o -name '*.pyi' -o -name '*.css' -o -name '*.js' -o -name py.typed)

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: system
system:
	@PYTHON='$(PYTHON)' scripts/install-system.sh

# Only the tests open the replay's page.
.PHONY: browser
browser:
	@PYTHON='$(PYTHON)' scripts/install-system.sh browser

$(SETUP): pyproject.toml scripts/install-python.sh | system
	PYTHON='$(PYTHON)' scripts/install-python.sh
	touch $@

.PHONY: setup
setup: system $(SETUP) ## system packages and the virtual environment .venv with the development tools

$(EXTENSION): $(SETUP) $(RUST)
	$(MATURIN) develop --release --locked
	touch $@

.PHONY: develop
develop: system $(EXTENSION) ## build the extension module (release) into .venv

# Fitted only where it is missing: after a clone all files are equally old.
$(READOUT): | $(EXTENSION)
	leap-fit $(TRAIN) --out $@ --eval $(TRACE) --rls

.PHONY: replay
replay: develop $(READOUT) ## replay the committed trace under every policy (TRACE=, LOAD=, REPLAY_ARGS=)
	leap-replay $(TRACE) --load $(LOAD) $(REPLAY_ARGS)

# Rust's own tests take seconds; what takes time is to build them.
.PHONY: test-rust
test-rust: setup
	$(CARGO) test --locked -p leap $(CARGO_TEST)

.PHONY: test-python
test-python: develop browser
	pytest -n $(WORKERS) --dist loadfile --ignore tests/engine $(PYTEST_ARGS)

.PHONY: test-plugin
test-plugin: $(PLUGIN)
	$(VENV_VLLM)/bin/python -m pytest tests/vllm tests/encoder $(PYTEST_ARGS)

.PHONY: test-engine
test-engine: $(PLUGIN)
	$(VENV_VLLM)/bin/python -m pytest tests/engine/shared $(PYTEST_ARGS)

.PHONY: test-server
test-server: $(PLUGIN)
	$(VENV_VLLM)/bin/python -m pytest tests/engine/served $(PYTEST_ARGS)

# Engines want a core each: they take turns on one, and all that is built and tested beside them on the other.
.PHONY: test
test: system browser compiler ## all tests: 10 minutes on two cores once everything is built, 15 in a fresh clone
	@$(MAKE) --no-print-directory -j2 --output-sync=target WORKERS=0 test-engine test-rust test-python test-server test-plugin

.PHONY: test-quick
test-quick: develop ## for the loop of a change: what needs no engine, no vLLM and no browser, in 2 minutes
	$(CARGO) test --locked -q -p leap $(CARGO_TEST)
	pytest -q -n $(WORKERS) --dist loadfile --ignore tests/engine -m 'not slow and not vllm' $(PYTEST_ARGS)

.PHONY: test-vllm
test-vllm: test-plugin test-engine test-server ## of all tests those of the plugin, on the real vLLM (its CPU build, in .venv-vllm: 6 GB)

.PHONY: test-long
test-long: $(PLUGIN) test-lowest ## what looks for the unknown: 1,000 scenarios, 500 settings, other versions of vLLM, lowest ones of the rest: half an hour
	LEAP_SCENARIOS=1000 LEAP_SETTINGS=500 $(VENV_VLLM)/bin/python -m pytest -q -n $(WORKERS) $(addprefix tests/vllm/,$(RANDOM)) $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory test-vllm-versions

# Its own environment has what the wheels of other versions are laid over.
.PHONY: test-vllm-versions
test-vllm-versions: $(PLUGIN) ## the plugin's tests that need no engine on the schedulers of vLLM 0.20, 0.26, 0.30 and 0.33 (VERSIONS=)
	VERSIONS='$(VERSIONS)' LEAP_SCENARIOS=60 scripts/test-vllm-versions.sh $(PYTEST_ARGS)

.PHONY: compiler
compiler:
	@PYTHON='$(PYTHON)' scripts/install-system.sh vllm

$(SETUP_VLLM): pyproject.toml scripts/install-vllm.sh | compiler
	PYTHON='$(PYTHON)' scripts/install-vllm.sh
	touch $@

# Both environments share the extension module; here the package is installed too, so that vLLM finds its entry points.
$(PLUGIN): $(SETUP_VLLM) | $(EXTENSION)
	VIRTUAL_ENV='$(VENV_VLLM)' $(MATURIN) develop --release --locked
	touch $@

.PHONY: test-lowest
test-lowest: $(WHEEL) ## the quick Python tests against the lowest versions of the dependencies
	scripts/test-lowest.sh

.PHONY: lint
lint: setup ## rustfmt, clippy, rustdoc, ruff, mypy, and the stub against the module
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --locked --no-deps -p leap
	ruff check
	ruff format --check
	mypy
	@$(MAKE) --no-print-directory develop
	pytest -q tests/test_stub.py

.PHONY: format
format: setup ## rewrite the sources in the house's format
	$(CARGO) fmt --all
	ruff check --fix
	ruff format

$(WHEEL): $(SETUP) $(RUST) $(FACE) pyproject.toml README.md LICENSE
	rm -rf dist
	trap '$(UNLINK)' EXIT; $(UNLINK); $(MATURIN) build --release --locked --auditwheel repair --out dist
	touch $@

.PHONY: wheel
wheel: system $(WHEEL) ## dist/*.whl: manylinux, abi3, OpenBLAS inside

# No criterion bench is called ratios-alone; `cargo bench -p leap` prints their absolute times as well.
.PHONY: bench
bench: develop ## speeds, each as a ratio to something measured in the same run
	OPENBLAS_NUM_THREADS=1 $(CARGO) bench --locked -q -p leap -- ratios-alone 2> >(grep -v '^Gnuplot' >&2)
	OPENBLAS_NUM_THREADS=1 python benches/rls_numpy.py

# The directory does not come with the project: without it the committed traces run alone.
.PHONY: grid
grid: develop $(READOUT) ## policies against stock over engines, traces and loads: who gains, who loses (DATA=DIR, GRID_ARGS=)
	python benches/grid.py $(if $(DATA),--data '$(DATA)') $(GRID_ARGS)

$(MODEL): | $(SETUP_VLLM)
	mkdir -p $(@D)
	rm -rf $@.tmp
	HF_HUB_OFFLINE=1 PYTHONPATH=benches $(VENV_VLLM)/bin/python tests/engine/transformers_process.py real $@.tmp
	mv $@.tmp $@

.PHONY: bench-vllm
bench-vllm: develop $(PLUGIN) | $(MODEL) ## what the plugin costs and changes on the real vLLM, beside stock (MODEL=DIR; PROMPTS=FILE, ENCODER=DIR)
	$(VENV_VLLM)/bin/python benches/vllm_overhead.py $(MODEL)
	$(VENV_VLLM)/bin/python benches/vllm_order.py $(MODEL)
	$(VENV_VLLM)/bin/python benches/vllm_memory.py $(MODEL)
	$(VENV_VLLM)/bin/python benches/vllm_scheduler.py
	[ -z '$(PROMPTS)' ] || $(VENV_VLLM)/bin/python benches/vllm_from_zero.py $(MODEL) '$(PROMPTS)'
	[ -z '$(PROMPTS)' ] || [ -z '$(ENCODER)' ] || $(VENV_VLLM)/bin/python benches/vllm_encoder.py $(MODEL) '$(PROMPTS)' --encoder '$(ENCODER)'

.PHONY: soak
soak: develop $(PLUGIN) | $(MODEL) ## random traffic on servers of the real vLLM, and what grows or stays behind: half an hour (SOAK_ARGS=)
	PYTHONPATH=python $(VENV_VLLM)/bin/python benches/vllm_soak.py $(MODEL) $(SOAK_ARGS)

.PHONY: bench-encoder
bench-encoder: develop $(PLUGIN) ## prompts a second that a text encoder reads on one core (ENCODER=DIR; TEXTS=FILE)
	$(VENV_VLLM)/bin/python benches/encoder.py $(if $(ENCODER),'$(ENCODER)') $(if $(TEXTS),--texts '$(TEXTS)')

.PHONY: fuzz
fuzz: develop ## mutated traces for every reader: 10 minutes (FUZZ=FILES, FUZZ_ARGS=)
	python benches/fuzz_traces.py tests/cases traces $(FUZZ) $(FUZZ_ARGS)

.PHONY: readout
readout: develop ## fit the readout that make replay uses on TRAIN, and evaluate it on TRACE
	leap-fit $(TRAIN) --out $(READOUT) --eval $(TRACE) --rls

.PHONY: traces
traces: develop ## make the committed traces again from the data in DATA=DIR and REAL=DIR
	@[ -n '$(DATA)' ] && [ -n '$(REAL)' ] || \
		{ echo 'usage: make traces DATA=DIR REAL=DIR (scripts/make_traces.py says what they hold)' >&2; exit 2; }
	python scripts/make_traces.py '$(DATA)' '$(REAL)' traces

.PHONY: clean
clean: ## remove what the other targets made
	rm -rf .venv .venv-vllm .cache dist target python/leap_rs/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find python tests benches -name __pycache__ -type d -prune -exec rm -rf {} +
