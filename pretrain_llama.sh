#!/usr/bin/env bash
#SBATCH --job-name=pretrain_llama
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#
# Pretrains Llama, Qwen3 or a tiny model on Megatron-core, with attention balanced over all ranks by distca.
#
#   sbatch pretrain_llama.sh                                      as a Slurm job; sbatch -N 4 asks for other nodes
#   salloc -N 2 --gpus-per-node=8 bash pretrain_llama.sh          inside an allocation
#   TP_SIZE=2 bash pretrain_llama.sh                              on one machine without Slurm
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host bash pretrain_llama.sh  on each of two machines without Slurm, as 0 and 1
#
# Arguments go to pretrain_llama.py, which `python pretrain_llama.py --help` explains. Each of its options is also a
# variable. Without a GPU it trains the tiny model on CPU ranks, and says so in its first line.
#
#   MODEL ATTENTION LAYERS                             tiny, llama-8b, llama-34b, qwen3-8b; distca or megatron
#   PING_PONG                                          1 computes one half of a micro-batch while rows of the other travel
#   TP_SIZE PP_SIZE VPP_SIZE                           tensor ranks, pipeline stages, chunks of a stage; the rest is data
#   CP_SIZE                                            data ranks over which a document may extend
#   TOKENS_PER_RANK MAX_DOCUMENT MICRO_BATCHES STEPS   what a step holds, and how many there are
#   DATA TOKENIZER EVAL_FRACTION EVAL_EVERY            text, tokens or a Megatron data set
#   RUN_DIR SAVE_EVERY                                 where the run is; a run in it is resumed
#
# Variables of this script:
#
#   NNODES          nodes (default: all of the allocation; without Slurm 1)
#   RANKS_PER_NODE  processes on each node (default: its GPUs, or those in CUDA_VISIBLE_DEVICES; on CPU as many as
#                   the parallel sizes need, on one machine at least 2)
#   PYTHON          the Python that has distca and megatron-core (default: .venv/bin/python, otherwise python3)
#   MASTER_PORT     port of the rendezvous (default: made of the job's number; without Slurm 29500)
#   ENABLE_NSYS     1 records ten steps of every process with Nsight Systems into RUN_DIR (default: 0; needs a GPU)
#   EXPERIMENT_LOG_MEMORY_USAGE        1 logs the memory of every rank into RUN_DIR (default: 0)
#   EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB  the size of distca's heap with TRANSPORT=nvshmem
#
# A batch job that is cancelled, or that reaches its time limit, writes a checkpoint; submit it again with its RUN_DIR.
# If a rank dies the job ends, and the last line says which one was first.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ ! -f "$here/pretrain_llama.py" ]; then # sbatch runs a copy of this file, and knows where it was
  # Its arguments follow the name. Every job of an array has a line; the first one will do.
  here=$(dirname "$(scontrol show job "$SLURM_JOB_ID" |
    sed -n '/^ *Command=/{s///;s#/pretrain_llama\.sh .*#/pretrain_llama.sh#;p;q}')")
fi
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x "$here/.venv/bin/python" ] && PYTHON=$here/.venv/bin/python
fi
number() { # NAME: a variable that must be a positive whole number, if it is set
  [[ "${!1-}" =~ ^([1-9][0-9]*)?$ ]] || { echo "pretrain_llama: error: $1 is ${!1}, must be a positive whole number" >&2; exit 2; }
}
for name in TP_SIZE PP_SIZE CP_SIZE; do # an argument counts more than a variable
  option=${name,,}
  [[ " $* " =~ .*\ --${option/_/-}[=\ ]0*([1-9][0-9]*)\  ]] && printf -v "$name" %s "${BASH_REMATCH[1]}"
done
for name in NNODES RANKS_PER_NODE MASTER_PORT TP_SIZE PP_SIZE CP_SIZE; do number $name; done

allocated=${SLURM_JOB_NUM_NODES:-}
NNODES=${NNODES:-${allocated:-1}}
if [ -n "$allocated" ] && [ "$NNODES" -gt "$allocated" ]; then
  echo "pretrain_llama: error: NNODES is $NNODES, and the allocation has $allocated nodes: sbatch -N $NNODES" >&2
  exit 2
fi
gpus=$( (command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU' || true)
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # which nvidia-smi does not go by
  gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cE '^ *([0-9]|GPU-|MIG-)' || true)
fi
least=$(((${TP_SIZE:-1} * ${PP_SIZE:-1} * ${CP_SIZE:-1} + NNODES - 1) / NNODES))
given=${RANKS_PER_NODE:-}
RANKS_PER_NODE=${given:-$((gpus > 0 ? gpus : least))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}

nsys=()
if [ "${ENABLE_NSYS:-0}" = 1 ]; then
  command -v nsys >/dev/null || { echo "pretrain_llama: error: ENABLE_NSYS is 1, and nsys is not on PATH" >&2; exit 2; }
  export RUN_DIR=${RUN_DIR:-logs/pretrain-${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}}
  mkdir -p "$RUN_DIR"
  nsys=(nsys profile --trace="cuda,nvtx" --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true
    --output="$RUN_DIR/nsys-%h-%p")
fi

if [ -z "$allocated" ] && [ "$NNODES" = 1 ] && [ "$gpus" = 0 ]; then # pretrain_llama.py starts CPU ranks by itself
  RANKS=${RANKS:-${given:-$((least > 1 ? least : 2))}} exec "$PYTHON" "$here/pretrain_llama.py" "$@"
fi
if [ -z "$allocated" ]; then
  rendezvous=(--nnodes="$NNODES" --node-rank="${NODE_RANK:-0}" --master-port="${MASTER_PORT:-29500}")
  if [ "$NNODES" -gt 1 ]; then
    rendezvous+=(--master-addr="${MASTER_ADDR:?NNODES is $NNODES: set MASTER_ADDR to the address of the first machine}")
  fi
  exec "${nsys[@]}" "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$RANKS_PER_NODE" \
    "$here/pretrain_llama.py" "$@"
fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export LOCAL_WORLD_SIZE=$RANKS_PER_NODE RUN_DIR=${RUN_DIR:-logs/pretrain-$SLURM_JOB_ID}
mkdir -p "$RUN_DIR"
errors=$RUN_DIR/errors-$SLURM_JOB_ID.log
: >"$errors"
# A signal for the job reaches srun too, which hands it on. This script stays to say how the ranks ended.
trap : TERM INT
scontrol show config | grep -qE '^TaskPlugin .*(affinity|cgroup)' && export SLURM_CPU_BIND=none # not one core a rank
srun --nodes="$NNODES" --ntasks=$((NNODES * RANKS_PER_NODE)) --ntasks-per-node="$RANKS_PER_NODE" --overcommit \
  --kill-on-bad-exit=1 "${nsys[@]}" "$PYTHON" "$here/pretrain_llama.py" "$@" 2> >(tee -a "$errors" >&2) &
step=$! status=0
wait $step || status=$?
while kill -0 $step 2>/dev/null; do # a signal has ended the wait
  status=0
  wait $step || status=$?
done
if [ $status != 0 ]; then
  sleep 0.2 # tee writes the last lines
  cause=$(grep -m 1 -E '^pretrain_llama: (error|rank [0-9]+ on [^:]+: [A-Z])' "$errors" ||
    grep -m 1 -E 'srun: error: .*task' "$errors" || grep -m 1 '^pretrain_llama: rank' "$errors" || tail -n 1 "$errors")
  echo "pretrain_llama: the job ended with exit code $status. First cause: $cause" >&2
fi
exit $status
