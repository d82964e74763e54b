# Sourced by run3d.sh and run4d.sh: runs `pretrain_llama.sh --compare` for each size and context, and makes a table.
#
#   TOKENS     tokens of a data rank in a micro-batch, one or more  (default on CPU: "1024 2048"; GPU: "65536 131072")
#   CP_SIZES   data ranks over which a document may extend, one or more; with more than 1, Megatron's way is per-document
#              context parallelism                               (default: "1"; run3d.sh "1 2")
#   CONTEXTS   most tokens of a document, one or more; "all" is TOKENS * CP_SIZE  (default: "all")
#   LENGTHS    JSON lists of document lengths, one or more          (default: lengths of a pretraining corpus)
#   DOC_SCALE  fraction of each length to keep                      (default on CPU: 0.125; GPU: 1)
#   ROUNDS     rounds of each run, after one that is not counted     (default: 5)
#   LOGS       where the runs go                                     (default: logs beside the script)
#
# Everything else goes to pretrain_llama.sh, variables and arguments: TP_SIZE, PP_SIZE, VPP_SIZE, NNODES, MODEL,
# LAYERS, MICRO_BATCHES, RECOMPUTE, ... It works in an allocation of Slurm, and by sbatch with a file that calls it.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
on_gpu=$( (command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU' || true)
if [ "$on_gpu" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # which nvidia-smi does not go by
  on_gpu=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cE '^ *([0-9]|GPU-|MIG-)' || true)
fi
if [ "$on_gpu" -gt 0 ]; then
  TOKENS=${TOKENS:-65536 131072} DOC_SCALE=${DOC_SCALE:-1}
else
  TOKENS=${TOKENS:-1024 2048} DOC_SCALE=${DOC_SCALE:-0.125}
fi
CONTEXTS=${CONTEXTS:-all} CP_SIZES=${CP_SIZES:-1} ROUNDS=${ROUNDS:-5} LENGTHS=${LENGTHS:-$root/benchmarks/workloads/doc_lengths_pretrain.json}
PYTHON=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
export DOC_SCALE PYTHON

sweep() { # FOLDER [ARGUMENT...]
  local folder tokens cp context lengths name failed=0
  folder=${LOGS:-$1/logs}/$(date +%Y%m%d-%H%M%S)
  shift
  mkdir -p "$folder"
  printf '%q ' "$0" "$@" >"$folder/command.txt"
  env | grep -E '^(NNODES|RANKS|[A-Z]+_SIZE|MODEL|LAYERS|MICRO_BATCHES|RECOMPUTE|DOC_SCALE|SEED)=' >>"$folder/command.txt" || true
  for lengths in $LENGTHS; do
    for tokens in $TOKENS; do
      for cp in $CP_SIZES; do
        for context in $CONTEXTS; do
          [ "$context" = all ] && context=$((tokens * cp))
          [ "$context" -le $((tokens * cp)) ] || continue # a document lies on so many data ranks
          name=$(basename "$lengths" .json)-tokens$tokens-cp$cp-context$context
          echo "== $name"
          if ! RUN_DIR=$folder/$name TOKENS_PER_RANK=$tokens CP_SIZE=$cp MAX_DOCUMENT=$context LENGTHS=$lengths \
            COMPARE=$ROUNDS bash "$root/pretrain_llama.sh" "$@" >"$folder/$name.log" 2>&1; then
            failed=1
            tail -n 1 "$folder/$name.log"
          else
            grep '^compare: ' "$folder/$name.log"
          fi
        done
      done
    done
  done
  echo
  PYTHONWARNINGS=ignore "$PYTHON" -m distca.apps.pretrain.table "$folder" || failed=1
  echo
  echo "runs, logs, results.jsonl, table.md and ways.png are in $folder"
  return $failed
}
