#!/usr/bin/env bash
# Data, context and tensor parallelism: distca, the same in ping-pong and without balance, and Megatron's schedule and
# attention, on the same batches in turn. Where documents extend over ranks, Megatron's way is per-document context
# parallelism; distca balances over all data ranks as ever.
#
#   bash benchmarks/example-3d-parallel/run3d.sh
#   salloc -N 2 --gpus-per-node=8 env TP_SIZE=8 MODEL=llama-8b bash benchmarks/example-3d-parallel/run3d.sh
#
# benchmarks/sweep.sh says which variables there are.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CP_SIZES=${CP_SIZES:-1 2}
# shellcheck disable=SC1091
source "$here/../sweep.sh"
export TP_SIZE=${TP_SIZE:-1} PP_SIZE=1 MICRO_BATCHES=${MICRO_BATCHES:-2}
sweep "$here" "$@"
