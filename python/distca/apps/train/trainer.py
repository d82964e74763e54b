"""The trainer: all that one rank does, from reading the documents to the summary."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.apps.common.corpus import Corpus
from distca.apps.common.memory_log import MemoryLog
from distca.apps.common.sources import DataError
from distca.apps.common.stopping import stop_request
from distca.apps.common.tokens import Tokenizer
from distca.apps.train.checkpoint import Checkpoints, RunState, Trained, whole_checkpoints
from distca.apps.train.config import TrainConfig
from distca.apps.train.corpora import check_held_out, read_corpora
from distca.apps.train.data import Batches
from distca.apps.train.data_parallel import DataParallel
from distca.apps.train.evaluation import Evaluation
from distca.apps.train.export import save_description
from distca.apps.train.log import RunLog
from distca.apps.train.metrics import StepMetrics
from distca.apps.train.model import check_positions
from distca.apps.train.progress import Progress
from distca.apps.train.resume import check_steps_left
from distca.apps.train.step import BALANCED, compared_step, train_step
from distca.apps.train.tracing import TRACED_STEPS, StepTraces, trace_files
from distca.apps.train.work import Parallelism
from distca.errors import DistcaError
from distca.trace.nsys import Capture


def train(config: TrainConfig, run_dir: Path | None) -> dict[str, Any]:
    """Trains on this rank. `torch.distributed` must be initialised.

    A run whose folder holds a checkpoint goes on from the last one. The run ends early, after a whole step, when any
    rank receives SIGINT or SIGTERM.

    Args:
        config: the options of the run.
        run_dir: the folder for metrics, summary and checkpoints. Only rank 0 needs to know it.

    Returns:
        The summary.

    Raises:
        ConfigError: the run has no step left, or an option does not fit the others.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokenizer = Tokenizer(config.tokenizer) if config.tokenizer is not None else None
    corpus, held_out = read_corpora(config, tokenizer)
    corpora = [corpus] if held_out is None else [corpus, held_out]
    for one in corpora:
        _check_same_corpus(one)
    run = _parallelism(config, corpus.vocabulary(tokenizer))
    check_held_out(held_out, run.model.config.get_text_config().vocab_size)
    check_positions(run.model.config, config, max(length for one in corpora for length in one.lengths()))
    trained = run.trained
    run_dir, last = _agree_on_run(run_dir)
    checkpoints = Checkpoints(run_dir, keep=config.keep_checkpoints)
    start = _resume(trained, checkpoints, last, corpus) if last is not None else 0
    check_steps_left(config, start, run_dir)
    ways = [BALANCED, *(run.compared if config.compare else ())]
    with stop_request() as stop, run.context() as context, ExitStack() as opened:
        planned = {
            way: opened.enter_context(run.steps(_batches(config, corpus, start, run), context, way)) for way in ways
        }
        progress = opened.enter_context(Progress(config.steps, start, shows=rank == 0))
        if rank == 0:
            save_description(run_dir, run.model.config, tokenizer)
        log = opened.enter_context(RunLog(config, run_dir if rank == 0 else None, corpus, start=start))
        log_file = run_dir / f"memory-rank{rank}.jsonl" if config.log_memory else None
        memory = opened.enter_context(MemoryLog(log_file, context))
        capture = opened.enter_context(closing(Capture(config.nsys, TRACED_STEPS)))
        traces = StepTraces(context, trace_files(run_dir, config.trace))
        evaluation = Evaluation(config, held_out, context, run)
        since = time.perf_counter()
        for step in range(start, config.steps):
            memory.step(step)
            watch = traces.watch(memory)
            of_ways = {way: next(steps) for way, steps in planned.items()}
            work = of_ways[BALANCED]
            if config.compare:
                for other in of_ways.values():
                    other.wait()
                shift = step % len(ways)  # the ways take turns at going first, so that none gains by it
                order = [(way, of_ways[way]) for way in ways[shift:] + ways[:shift]]
                result = compared_step(trained, order, stop, since, watch)
            else:
                result = train_step(trained, work, stop, since, watch)
            of_all = {way: other.loads() for way, other in of_ways.items()}
            loads = of_all[BALANCED]
            traces.step(step, sum(other.after[context.rank] for other in of_all.values()))
            capture.step(step + 1)
            metrics = StepMetrics.of(step, result, work.layouts, loads)
            taken = step + 1
            interrupted = result.interrupted and taken < config.steps  # after the last step nothing is left out
            if evaluation.due(taken, interrupted):
                metrics = replace(metrics, eval_loss=evaluation.loss())
                traces.skip()
            log.step(metrics, loads)
            progress.step(metrics, interrupted=interrupted)
            if not math.isfinite(result.loss):
                raise DistcaError(f"the loss is {result.loss} at step {taken}: lower --lr (now {config.lr:g})")
            if interrupted or taken == config.steps or _due(taken, config.checkpoint_every):
                checkpoints.save(trained, RunState(taken, ranks, corpus.fingerprint))
                traces.skip()
            if interrupted:
                break
            since = time.perf_counter()
        if config.export is not None and not interrupted:
            run.export(run_dir, config.export)
        traces.write()
        more = run.report(run_dir, traces.everyone)
        return log.finish(interrupted, context.attention, run.notes(), traces.everyone, more)


def _parallelism(config: TrainConfig, vocabulary: int) -> Parallelism:
    if not config.is_split:
        return DataParallel(config, vocabulary)
    from distca.apps.train.split_run import SplitRun

    return SplitRun(config, vocabulary)


def _batches(config: TrainConfig, corpus: Corpus, start: int, run: Parallelism) -> Batches:
    """The micro-batches of this process from that step on."""
    return Batches(
        corpus,
        rank=run.data_rank,
        ranks=run.data_ranks,
        tokens_per_rank=config.tokens_per_rank,
        steps=config.steps * config.micro_batches,
        seed=config.seed,
        homes=config.homes,
        context=config.context,
        start=start * config.micro_batches,
    )


def _due(taken: int, every: int) -> bool:
    return every > 0 and taken % every == 0


def _agree_on_run(run_dir: Path | None) -> tuple[Path, Path | None]:
    """Rank 0's folder of the run, and its last checkpoint or None. What a kill left half written is removed."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        assert run_dir is not None
        Checkpoints(run_dir, keep=1).remove_leftovers()
        found = [run_dir, next(reversed(whole_checkpoints(run_dir).values()), None)]
    dist.broadcast_object_list(found, src=0)
    return found[0], found[1]


def _resume(trained: Trained, checkpoints: Checkpoints, last: Path, corpus: Corpus) -> int:
    """Loads the checkpoint and returns the number of steps taken."""
    state = checkpoints.load(trained, last)
    if state.corpus != corpus.fingerprint:
        raise DataError(
            f"the documents are not those of the checkpoint {last}: a resumed run needs the same --data and --doc-scale"
        )
    return state.step


def _check_same_corpus(corpus: Corpus) -> None:
    mine = torch.tensor([corpus.fingerprint, len(corpus)], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if not torch.equal(theirs, everyone[0]):
            raise DataError(
                f"rank {rank} has read {int(theirs[1])} documents that differ from the {int(everyone[0][1])} of rank "
                "0: all ranks need the same data folder"
            )
