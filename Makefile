# make build   set up .venv and build the package in place; leaves .venv/bin/distca
# make train   train a tiny Llama on two CPU ranks             (ARGS="--steps 50" hands options to `distca train`)
# make test    run the tests but those of the targets below    (ARGS="-k plan" hands options to pytest)
# make training  run the tests that train for minutes, which `make test` leaves out: beside the trainers of transformers,
#              TRL and Lightning, the examples, every feature of a run, kills and what is resumed (EVERY=2: every second
#              form of a run whose processes share the model)
# make processes  run the tests of processes that die, hang, are interrupted or lose their network: they wait for seconds
# make fuzz    run the tests of the planner, and of changed plans, with 20 times as many random cases
# make families  run every causal and masked language model of transformers on two ranks, and train the causal ones by
#              four processes that share them: exact, or refused with the reason (EVERY=5: every fifth there, and on
#              padded batches)
# make titan     install torchtitan; run its models and its Trainer on CPU ranks: exact, or refused with the reason
# make pipeline  run data, tensor and pipeline parallelism together in eight processes, in many forms, and with
#              torch.distributed.pipelining: exact
# make megatron  run Megatron-core with distca in many forms (EVERY=3: in every third), in four and in eight processes:
#              exact
# make pretraining  run pretrain_llama.sh by bash and, where Slurm is installed, as jobs of a cluster of two nodes; run
#              forms of four processes beside Megatron's own schedule
# make protocol  check the model of the steps' protocol with spin, where it is installed
# make faults  plant faults in the sources one by one and check that the tests catch each
# make sanitize  run the CPU kernel on random problems, and the validation of changed plans, under AddressSanitizer,
#              UndefinedBehaviorSanitizer, ThreadSanitizer
# make bench   run the short form of all benchmarks and rewrite benchmarks/results
# make ptxas   print registers, shared memory and spills of the CUDA kernels; fails where attention kernels spill
# make lint    check formatting and types
# make docs    build the pages and the reference of the API as a site in build/docs (Python >= 3.11)
# make wheel   build dist/*.whl
# make clean   remove what was built, .venv included
#
# Needs: Python >= 3.10 with venv and headers, a C++20 compiler, make. CMake and ninja come as wheels.
#
# CUDA: where nvcc >= 12.8 is on PATH or named by CUDACXX, test, ptxas, faults and wheel also build what runs on a GPU;
# build and train do so only where a GPU is there. DISTCA_CUDA=0 leaves it out of all, DISTCA_CUDA=1 makes it an error
# where it cannot be built.
#
# PyTorch: where the Python that runs make (PYTHON; by default the python3 on PATH, so that of an activated environment)
# has PyTorch >= 2.10, that one is used: .venv sees that Python's packages too, after its own (outer.pth names them).
# Else the version pinned in pyproject.toml is installed. To have another build of PyTorch, install it first.

PYTHON ?= python3
ARGS ?=
EVERY ?= 1
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Succeeds where a Python has torch >= 2.10; reads metadata only, for an import takes seconds.
HAS_TORCH := -c 'import re, sys; from importlib.metadata import distributions as d; \
  v = [re.findall(r"\d+", t.version)[:2] for t in d(name="torch")][:1]; \
  sys.exit(not (v and [int(n) for n in v[0]] >= [2, 10]))'

NVCC := $(if $(filter 0,$(DISTCA_CUDA)),,$(shell command -v "$${CUDACXX:-nvcc}"))

CPP_FILES = $(shell find cpp cuda tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')
# Folders too: a removed file changes its folder. But Python's cache of cuda/ptxas.py changes nothing.
SOURCES = CMakeLists.txt setup.py pyproject.toml $(shell find cpp cuda third_party -mindepth 1 -name __pycache__ -prune -o -print)

GPU := $(if $(NVCC),$(shell nvidia-smi -L 2>/dev/null))
# Whether builds in place have the CUDA code.
CUDA_IN_PLACE := $(GPU)$(if $(NVCC),$(filter 1 auto,$(DISTCA_CUDA)))
ALL := DISTCA_CUDA=$(or $(DISTCA_CUDA),auto)
INSTALL := $(PIP) install --no-build-isolation --no-deps --editable .

# Whole runs, one after the other for minutes.
TRAINING := $(addprefix tests/integrations/test_,trainer.py trl.py lightning.py examples.py) \
  $(addprefix tests/apps/test_train_,reference.py features.py export.py checkpoint.py resume.py damage.py ends.py) \
  $(addprefix tests/apps/test_train_split,.py _forms.py _resume.py _ends.py) \
  $(addprefix tests/apps/test_train_,models.py weights.py)

# Processes that die, hang, are interrupted or lose their network. Most of the time they wait.
PROCESSES := tests/connect/test_launch_interrupts.py tests/pipeline/test_tensor_faults.py \
  $(addprefix tests/runtime/test_,process_death.py interrupts.py) \
  $(addprefix tests/transport/test_,cut_network.py torch_transport_faults.py)

# Several processes, for up to a minute. Targets of their own have more of them.
PIPELINE := tests/integrations/test_torch_pipelining.py
MEGATRON := tests/integrations/test_megatron.py
PRETRAINING := tests/apps/test_pretrain.py

# Run by a target of their own, because torchtitan needs triton: 290 MB, and 1 GB once installed.
TITAN := $(addprefix tests/integrations/test_torchtitan,.py _trainer.py)

# Searches of all orders of events, more than a minute of them.
PROTOCOL := tests/runtime/test_protocol_model.py

.PHONY: build train test training processes fuzz families titan pipeline megatron pretraining protocol faults sanitize bench ptxas \
  lint docs wheel clean
.DELETE_ON_ERROR:

build: $(VENV)/built

train: build
	$(BIN)/distca train $(ARGS)

test: $(VENV)/built-all $(VENV)/test-ready $(VENV)/programs-ready
	$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix --ignore=,$(TRAINING) $(PIPELINE) $(MEGATRON) \
	  $(PRETRAINING) $(TITAN) $(PROTOCOL) $(PROCESSES)) $(ARGS)

training: $(VENV)/built-all $(VENV)/test-ready
	EVERY=$(EVERY) $(BIN)/python -m pytest -n 2 --dist worksteal $(TRAINING) $(ARGS)

processes: $(VENV)/built-all $(VENV)/test-ready
	$(BIN)/python -m pytest -n 4 --dist worksteal $(PROCESSES) $(ARGS)

fuzz: build $(VENV)/test-ready
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=fuzz \
	  $(addprefix tests/plan/test_,plan.py plan_loads.py plan_memory.py plan_digest.py scheduler.py plan_fuzz.py) $(ARGS)

families: build $(VENV)/test-ready
	EVERY=$(EVERY) $(BIN)/python -m pytest -n 2 --dist worksteal tests/integrations/families/every_model.py \
	  tests/apps/every_split.py $(ARGS)

titan: build $(VENV)/titan-ready
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TITAN) $(ARGS)

protocol: build $(VENV)/test-ready
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PROTOCOL) $(ARGS)

pipeline: build $(VENV)/test-ready
	$(BIN)/python -m pytest $(PIPELINE) tests/pipeline/every_*.py $(ARGS)

# The long ones first, and one by one: no process then has several of them left.
megatron: build $(VENV)/test-ready
	EVERY=$(EVERY) $(BIN)/python -m pytest -n 2 --dist load --maxschedchunk 1 tests/integrations/every_megatron.py $(MEGATRON) $(ARGS)

pretraining: build $(VENV)/test-ready
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PRETRAINING) tests/apps/every_pretraining_*.py $(ARGS)

faults: $(VENV)/built-all $(VENV)/titan-ready
	PYTHONPATH=tests $(BIN)/python -m faults.planted_faults $(ARGS)

sanitize: $(VENV)/ready
	for kind in address,undefined thread; do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S tests/sanitize -B "build/sanitize-$$kind" -DDISTCA_SANITIZE="$$kind" && \
	  PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build "build/sanitize-$$kind" && \
	  "build/sanitize-$$kind/kernel_stress" $(ARGS) && "build/sanitize-$$kind/plan_words" || exit 1; \
	done

bench: build
	$(BIN)/distca bench all --short --results benchmarks/results $(ARGS)

lint: $(VENV)/test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

ptxas: $(VENV)/built-all
	$(BIN)/python cuda/ptxas.py report build

# Without what an earlier run left in setuptools' own folders, modules since removed among it.
wheel: $(VENV)/ready $(if $(NVCC),$(VENV)/cuda-ready)
	rm -rf build/lib.* build/bdist.*
	$(ALL) $(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist python/*.egg-info python/distca/*.so python/distca/testing/*.so

$(VENV)/built: $(VENV)/ready $(if $(CUDA_IN_PLACE),$(VENV)/cuda-ready) $(SOURCES)
	@rm -f $(VENV)/built-all
	$(INSTALL)
	@touch $@

$(VENV)/built-all: $(VENV)/ready $(if $(NVCC),$(VENV)/cuda-ready) $(SOURCES)
	$(ALL) $(INSTALL)
	@touch $(VENV)/built $@

$(VENV)/test-ready: $(VENV)/ready
	$(PIP) install --group test --group lint
	$(PIP) install --no-deps --group trainer --group trl --group lightning --group megatron
	@touch $@

# Programs that tests compile where they find none, which takes a minute.
$(VENV)/programs-ready: $(VENV)/built-all $(VENV)/test-ready $(CPP_FILES) tests/support/programs.py \
  tests/emulation/emulated_gpu.py
	PYTHONPATH=tests $(BIN)/python -m support.programs
	@touch $@

$(VENV)/titan-ready: $(VENV)/test-ready
	$(PIP) install --no-deps --group torchtitan
	@touch $@

$(VENV)/cuda-ready: $(VENV)/ready
	$(PIP) install --no-deps --group cuda
	@# PyTorch's wheels for CUDA bring the NVSHMEM that they load: distca must be built with that one.
	$(BIN)/python -c 'from importlib.util import find_spec as f; exit(not (f("nvidia") and f("nvidia.nvshmem")))' || \
	  $(PIP) install --no-deps --group nvshmem
	@touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(PIP) install --group docs
	@touch $@

$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'distca needs Python >= 3.10: install python3 (Debian, Ubuntu: apt-get install python3),' \
	       'or name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "distca needs Python's venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { \
	  echo "distca needs Python's headers, Python.h (Debian, Ubuntu: apt-get install python3-dev)" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || { \
	  echo "distca needs a C++20 compiler, $${CXX:-c++} was not found (Debian, Ubuntu: apt-get install g++)" >&2; exit 1; }
	@printf '%s\n' '#include <bit>' '#include <span>' 'static_assert(std::bit_cast<unsigned>(0.0f) == 0);' \
	  '#if !__has_builtin(__builtin_shufflevector)' '#error' '#endif' | \
	  "$${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - || { \
	  echo "distca needs a C++20 compiler, $${CXX:-c++} is too old or incomplete: install GCC >= 12 or Clang >= 14" \
	       "and name it: make CXX=g++-12" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys; sys.exit(os.path.realpath("$(VENV)") == sys.prefix)' || { \
	  echo '$(VENV) is about to be made anew and cannot make itself: deactivate it first' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@# The first pip that reads the groups of pyproject.toml.
	$(PIP) install 'pip>=25.1'
	$(PIP) install $$($(PYTHON) $(HAS_TORCH) || echo --group torch) --group build --group train --group ping-pong
	@! $(PYTHON) $(HAS_TORCH) || { \
	  echo 'using the PyTorch of $(PYTHON)'; \
	  $(PYTHON) -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	    > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"; }
	@touch $@
