#!/usr/bin/env bash
# Data, tensor and pipeline parallelism: distca, the same in ping-pong and without balance, and Megatron's schedule and
# attention, on the same batches in turn. Attention is balanced over the data ranks and the stages.
#
#   bash benchmarks/example-4d-parallel/run4d.sh
#   salloc -N 4 --gpus-per-node=8 env TP_SIZE=8 PP_SIZE=2 MODEL=llama-8b bash benchmarks/example-4d-parallel/run4d.sh
#
# benchmarks/sweep.sh says which variables there are.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck disable=SC1091
source "$here/../sweep.sh"
export TP_SIZE=${TP_SIZE:-1} PP_SIZE=${PP_SIZE:-2}
sweep "$here" "$@"
