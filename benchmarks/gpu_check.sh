#!/usr/bin/env bash
# Builds what is missing, runs all tests that need a GPU and the short benchmarks on it: under 8 minutes on 16 cores.
#
#   benchmarks/gpu_check.sh [FOLDER]      default: build/gpu-check
#
# Writes FOLDER/gpu_check.json (what ran, how long, which tests failed or were skipped, all figures) and
# FOLDER/gpu_check.log (everything that was printed). Fetches nothing: it takes cmake, ninja, nvcc, PyTorch, pybind11 and
# pytest as they are, of PYTHON (default: python3), and CUTLASS from the package nvidia-cutlass or CUTLASS_DIR.
# Exits with 1 where a step failed or no GPU was found.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(command -v "${PYTHON:-python3}")
mkdir -p "${1:-build/gpu-check}"
out=$(cd "${1:-build/gpu-check}" && pwd)
log="$out/gpu_check.log"
rm -f "$out"/*.json "$out"/tests.xml "$out/steps"
: >"$log"

# Runs a step within its time and notes how it ended.
step() {
  local name=$1 limit=$2 begin=$SECONDS code=0
  shift 2
  echo "== $name: $*" | tee -a "$log"
  timeout "$limit" "$@" >>"$log" 2>&1 || code=$?
  echo "$name $code $((SECONDS - begin))" >>"$out/steps"
  echo "   exit $code after $((SECONDS - begin)) s"
}

export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi >>"$log" 2>&1
step configure 60 cmake -S . -B "$out/objects" -G Ninja "-DPython_EXECUTABLE=$python" -DDISTCA_CUDA=ON
step build 240 cmake --build "$out/objects" --parallel
step install 30 cmake --install "$out/objects" --prefix python/distca
step ptxas 30 "$python" cuda/ptxas.py report "$out/objects"
step doctor 60 "$python" -m distca doctor
# Streams of ranks that share a GPU must not share one of its queues.
CUDA_DEVICE_MAX_CONNECTIONS=32 step tests 210 "$python" -m pytest -q -p no:cacheprovider "--junitxml=$out/tests.xml" \
  tests/cuda tests/attention/test_flash.py tests/runtime/test_streams.py tests/transport/test_stream*.py
for benchmark in attention shards transport; do
  step "bench-$benchmark" 90 "$python" -m distca bench "$benchmark" --device cuda --short --json "$out/$benchmark.json"
done

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
if (out / "tests.xml").exists():
    outcomes = {"passed": 0, "failed": [], "skipped": {}}
    for case in ElementTree.parse(out / "tests.xml").iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        if "failure" in kinds or "error" in kinds:
            outcomes["failed"].append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            outcomes["skipped"][kinds["skipped"]] = outcomes["skipped"].get(kinds["skipped"], 0) + 1
        else:
            outcomes["passed"] += 1
    result["tests"] = outcomes
for name in ("attention", "shards", "transport"):
    if (out / f"{name}.json").exists():
        result[name] = json.loads((out / f"{name}.json").read_text())
(out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
failed = [name for name, step in result["steps"].items() if step["exit"]]
print(f"GPU: {result['gpu']}; failed: {', '.join(failed) or 'nothing'}; {out / 'gpu_check.json'} and .log written")
sys.exit(1 if failed or result["gpu"] is None else 0)
PYTHON
