#!/usr/bin/env bash
# Builds what is missing, runs all tests that need a GPU and the short benchmarks on it: under 10 minutes on 16 cores.
#
#   benchmarks/gpu_check.sh [FOLDER]      default: build/gpu-check
#
# Writes FOLDER/gpu_check.json (what ran, how long, which tests failed or were skipped, all figures) and
# FOLDER/gpu_check.log (everything that was printed). Fetches nothing: it takes cmake, ninja, nvcc as they are, PyTorch,
# pybind11, numpy, pytest >= 9 and hypothesis of PYTHON (default: python3), and CUTLASS from the package nvidia-cutlass
# or CUTLASS_DIR. Exits with 1 where a step failed or no GPU was found. What needs the build is left out if that failed.
set -uo pipefail
given=${1:+$(realpath -m -- "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=$(command -v "${PYTHON:-python3}") || { echo "there is no ${PYTHON:-python3}"; exit 1; }
out=${given:-$PWD/build/gpu-check}
mkdir -p "$out"
log="$out/gpu_check.log"
benchmarks=(attention shards transport)
rm -f "$out"/gpu_check.json "$out/verify.json" "$out"/tests-*.xml "$out/steps"
for benchmark in "${benchmarks[@]}"; do rm -f "$out/$benchmark.json"; done
: >"$log"

# Runs a step within its time and notes how it ended. Returns how the command ended.
step() {
  local name=$1 limit=$2 begin=$SECONDS code=0
  shift 2
  echo "== $name: $*" | tee -a "$log"
  timeout --kill-after=5 "$limit" "$@" >>"$log" 2>&1 || code=$?
  echo "$name $code $((SECONDS - begin))" >>"$out/steps"
  echo "   exit $code after $((SECONDS - begin)) s"
  return "$code"
}

# Tests run in processes of their own: after an illegal access, or a kernel that hangs, a process can use no GPU.
tests() {
  local name=$1 limit=$2
  shift 2
  step "tests-$name" "$limit" "$python" -m pytest -v -p no:cacheprovider -o "faulthandler_timeout=$((limit - 15))" \
    "--junitxml=$out/tests-$name.xml" "$@"
}

check_attention() {
  local objects="$out/objects/CMakeFiles" nvcc
  # The compiler of the build, which need not be on PATH.
  nvcc=$(sed -n 's/^CMAKE_CUDA_COMPILER:[A-Z]*=//p' "$out/objects/CMakeCache.txt")
  "$nvcc" -std=c++20 -gencode arch=compute_80,code=compute_80 -O3 --expt-relaxed-constexpr -I cuda -I cpp \
    cuda/attention/check/check_attention.cu "$objects"/distca_cuda.dir/cuda/attention/*.o \
    "$objects/distca.dir/cpp/transport/table.cpp.o" -o "$out/check_attention" && "$out/check_attention" &&
    if [[ $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1) == 9.0 ]]; then
      "$out/check_attention" --ampere # the kernels of other GPUs run there, too
    fi
}
export out
export -f check_attention

export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi >>"$log" 2>&1
needed="import hypothesis, numpy, pybind11, pytest, torch; assert int(pytest.__version__.split('.')[0]) >= 9, pytest"
if step packages 60 "$python" -c "$needed" &&
  step configure 60 cmake -S . -B "$out/objects" -G Ninja "-DPython_EXECUTABLE=$python" -DDISTCA_CUDA=ON &&
  step build 240 cmake --build "$out/objects" --parallel &&
  step install 30 cmake --install "$out/objects" --prefix python/distca; then
  step ptxas 30 "$python" cuda/ptxas.py report "$out/objects"
  step doctor 60 "$python" -m distca doctor
  step check-attention 120 bash -c check_attention
  step verify 240 "$python" -m distca verify --json "$out/verify.json"
  # Streams of ranks that share a GPU must not share one of its queues. Kernels are loaded at once, because loading one
  # may wait for those of another rank.
  export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER
  tests flash 90 tests/attention/test_flash.py tests/cuda/test_flash_ranks.py
  tests streams 90 tests/transport/test_stream_processes.py
  tests kernels 120 tests/cuda/test_cuda_kernels.py
  tests graphs 90 tests/cuda/test_cuda_graphs.py
  unset CUDA_DEVICE_MAX_CONNECTIONS CUDA_MODULE_LOADING
  tests users 120 tests/cuda/test_gpu_users.py
  for benchmark in "${benchmarks[@]}"; do
    step "bench-$benchmark" 150 "$python" -m distca bench "$benchmark" --device cuda --short --json "$out/$benchmark.json"
  done
fi

"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

out = Path(sys.argv[1])
steps = [line.split() for line in (out / "steps").read_text().splitlines()]
result = {"steps": {name: {"exit": int(code), "seconds": int(took)} for name, code, took in steps}}
try:
    import torch

    result["torch"] = torch.__version__
    result["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
except ImportError as error:
    result["gpu"] = None
    result["torch"] = str(error)
outcomes = {"passed": 0, "failed": [], "skipped": {}}
for file in sorted(out.glob("tests-*.xml")):  # a step that was killed has none
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        if "failure" in kinds or "error" in kinds:
            outcomes["failed"].append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            outcomes["skipped"][kinds["skipped"]] = outcomes["skipped"].get(kinds["skipped"], 0) + 1
        else:
            outcomes["passed"] += 1
result["tests"] = outcomes
for name in ("verify", "attention", "shards", "transport"):
    try:
        result[name] = json.loads((out / f"{name}.json").read_text())
    except (OSError, ValueError) as error:  # not written, or cut off
        result[name] = str(error)
(out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
failed = [name for name, step in result["steps"].items() if step["exit"]]
print(f"GPU: {result['gpu']}; failed: {', '.join(failed) or 'nothing'}; {out / 'gpu_check.json'} and .log written")
sys.exit(1 if failed or result["gpu"] is None else 0)
PYTHON
