"""The trainer: all that one rank does, from reading the documents to the summary."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from distca.apps.train.checkpoint import Checkpoints, RunState, Trained, whole_checkpoints
from distca.apps.train.config import TrainConfig
from distca.apps.train.corpora import read_corpora
from distca.apps.train.corpus import Corpus
from distca.apps.train.data import Batches
from distca.apps.train.evaluation import Evaluation
from distca.apps.train.export import export_model
from distca.apps.train.files import writing
from distca.apps.train.log import RunLog
from distca.apps.train.memory_log import MemoryLog
from distca.apps.train.metrics import AttentionLoads, StepMetrics
from distca.apps.train.micro_batches import MicroBatch, planned
from distca.apps.train.model import build_model, check_positions, wrap
from distca.apps.train.optimizer import make_optimizer
from distca.apps.train.progress import Progress
from distca.apps.train.resume import check_steps_left
from distca.apps.train.sources import DataError
from distca.apps.train.step import compared_step, train_step
from distca.apps.train.tokens import Tokenizer
from distca.apps.train.tracing import TRACED_STEPS, StepTraces, trace_files
from distca.connect.init import init
from distca.errors import DistcaError
from distca.integrations.hf import heads_of, windows_of
from distca.pingpong.ping_pong import PingPong
from distca.trace.nsys import Capture

_SAME_SIGNAL_SECONDS = 0.5  # torchrun repeats the terminal's Ctrl-C


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
    model = build_model(config, corpus.vocabulary(tokenizer))
    shape = model.config.get_text_config()
    check_positions(shape, config, max(length for one in corpora for length in one.lengths()))
    heads, windows = heads_of(shape, config.torch_dtype), windows_of(shape)
    trained = _start_of_training(wrap(model, config), model, config)
    run_dir, last = _agree_on_run(run_dir)
    checkpoints = Checkpoints(run_dir, keep=config.keep_checkpoints)
    start = _resume(trained, checkpoints, last, corpus) if last is not None else 0
    check_steps_left(config, start, run_dir)
    batches = _batches(config, corpus, start)
    with (
        stop_request() as stop,
        init(max_tokens=config.tokens_per_rank, heads=heads, timeout=config.timeout, nsys=config.nsys) as context,
        planned(config, batches, context, windows, balance=config.balance == "on") as micro_batches,
        planned(config, batches, context, windows, balance=False) if config.compare else nullcontext() as others,
        Progress(config.steps, start, shows=rank == 0) as progress,
        RunLog(config, run_dir if rank == 0 else None, corpus, start=start) as log,
        MemoryLog(run_dir / f"memory-rank{rank}.jsonl" if config.log_memory else None, context) as memory,
        closing(Capture(config.nsys, TRACED_STEPS)) as capture,
    ):
        traces = StepTraces(context, trace_files(run_dir, config.trace))
        evaluation = Evaluation(config, held_out, context, windows)
        since = time.perf_counter()
        for step in range(start, config.steps):
            memory.step(step)
            watch = traces.watch(memory)
            work = Kept(itertools.islice(micro_batches, config.accumulate))
            if others is None:
                result = train_step(trained, work, stop.requested, since, watch)
            else:
                unbalanced = list(itertools.islice(others, config.accumulate))
                first = step % 2 == 0  # plans take turns at going first, so that neither gains by it
                result = compared_step(trained, list(work), unbalanced, stop.requested, since, first, watch)
            loads = AttentionLoads.of([micro_batch.plans for micro_batch in work.kept], windows)
            traces.step(step, loads.after[rank] + (loads.before[rank] if others is not None else 0))
            capture.step(step + 1)
            metrics = StepMetrics.of(step, result, [plans.layout for one in work.kept for plans in one.plans], loads)
            taken = step + 1
            if evaluation.due(taken, result.interrupted):
                metrics = replace(metrics, eval_loss=evaluation.loss(trained))
                traces.skip()
            log.step(metrics, loads)
            progress.step(metrics, interrupted=result.interrupted)
            if not math.isfinite(result.loss):
                raise DistcaError(f"the loss is {result.loss} at step {step}: lower --lr (now {config.lr:g})")
            if result.interrupted or taken == config.steps or _due(taken, config.checkpoint_every):
                checkpoints.save(trained, RunState(taken, ranks, corpus.fingerprint))
            if result.interrupted:
                break
            since = time.perf_counter()
        if config.export is not None and not result.interrupted:
            export_model(model, config.export, tokenizer)
        with writing(run_dir):
            traces.write()
        return log.finish(result.interrupted, _notes(trained.model), traces.everyone)


def _batches(config: TrainConfig, corpus: Corpus, start: int) -> Batches:
    """The micro-batches of this rank from that step on."""
    return Batches(
        corpus,
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        tokens_per_rank=config.tokens_per_rank,
        steps=config.steps * config.accumulate,
        seed=config.seed,
        start=start * config.accumulate,
    )


def _due(taken: int, every: int) -> bool:
    return every > 0 and taken % every == 0


def _notes(model: torch.nn.Module) -> list[str]:
    whole = sum(module.unsharded_bytes for module in model.modules() if isinstance(module, PingPong))
    return [f"ping-pong keeps {whole / 1e6:.1f} MB of weights whole on every rank in a step"] if whole else []


def _start_of_training(model: torch.nn.Module, saved: torch.nn.Module, config: TrainConfig) -> Trained:
    optimizer, schedule = make_optimizer(model, config)
    return Trained(model, optimizer, schedule, saved if config.ping_pong else None, config.clip_norm)


class Kept:
    """Passes micro-batches on as they come, and keeps them."""

    def __init__(self, micro_batches: Iterable[MicroBatch]) -> None:
        self._rest = micro_batches
        self.kept: list[MicroBatch] = []

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro_batch in self._rest:
            self.kept.append(micro_batch)
            yield micro_batch


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


@dataclass
class StopRequest:
    """Whether this rank was asked to stop after the current step, and when."""

    requested: bool = False
    at: float = 0.0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request. A later one ends the process at once."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if request.requested and now - request.at > _SAME_SIGNAL_SECONDS:
            os._exit(128 + number)
        if not request.requested:
            request.requested, request.at = True, now

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
