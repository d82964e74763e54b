#!/usr/bin/env bash
# What to run first on a machine whose processor has AMX: builds, checks the kernel's variant `amx`, and measures it.
#
#   benchmarks/amx_check.sh [FOLDER]      default: build/amx-check
#
# Writes FOLDER/amx_check.log (everything that was printed) and a JSON file of `distca bench attention` for each variant
# that bf16 can have there: on tiles, with the dot instruction, and converted to fp32. Exits with 1 where a step failed
# or the processor, or the system, has no tiles to give.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
grep -qw amx_bf16 /proc/cpuinfo || { echo "amx_check: this processor has no amx_bf16"; exit 1; }
mkdir -p "${1:-build/amx-check}"
out=$(cd "${1:-build/amx-check}" && pwd)
log="$out/amx_check.log"
: >"$log"
failed=0

# Runs a step and notes how it ended.
step() {
  echo "== $*" | tee -a "$log"
  "$@" >>"$log" 2>&1 || { failed=1; echo "   failed, see $log"; }
}

lscpu >>"$log"
step make build .venv/test-ready
if ! DISTCA_CPU_ISA=amx .venv/bin/python -c "import distca; distca._C.cpu_isa()" >>"$log" 2>&1; then
  tail -n 1 "$log"
  exit 1
fi
step .venv/bin/distca doctor
# One test compares the bits of the tiles with those of their emulation.
step env DISTCA_CPU_ISA=amx .venv/bin/python -m pytest -q -rs tests/attention tests/runtime/test_exactness.py \
  tests/runtime/test_steps.py tests/connect/test_agreement.py
for isa in amx avx512_bf16 avx512; do
  step env DISTCA_CPU_ISA=$isa .venv/bin/distca bench --short attention --json "$out/attention-$isa.json"
done
grep -E "^  (bf16|shards)" "$log"
exit $failed
