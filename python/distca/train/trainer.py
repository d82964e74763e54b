"""The trainer: what one rank does, from reading the documents to the summary."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from distca.context import init
from distca.errors import DistcaError
from distca.integrations import hf
from distca.plan_ahead import PlanAhead
from distca.planning import Plan
from distca.train.checkpoint import Checkpoints, RunState, Trained, whole_checkpoints
from distca.train.config import VOCABULARY, TrainConfig
from distca.train.data import Batch, Batches, Corpus, DataError, read_corpus
from distca.train.metrics import RunLog, StepMetrics

WARMUP_STEPS = 5
_SAME_SIGNAL_SECONDS = 0.5  # torchrun repeats the terminal's Ctrl-C


def train(config: TrainConfig, run_dir: Path | None) -> dict[str, Any]:
    """Trains on this rank; `torch.distributed` is initialised. Returns the summary.

    Metrics, summary and checkpoints go to `run_dir`, of which only rank 0 needs to know. Where it holds a checkpoint
    the run goes on from the last one. It ends early, after a whole step, when any rank receives SIGINT or SIGTERM.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    corpus = read_corpus(config.data, config.kept_fraction)
    _check_same_corpus(corpus)
    trained = _start_of_training(config)
    run_dir, last = _agree_on_run(run_dir)
    checkpoints = Checkpoints(run_dir, keep=config.keep_checkpoints)
    start = _resume(trained, checkpoints, last, corpus) if last is not None else 0
    batches = Batches(
        corpus,
        rank=rank,
        ranks=ranks,
        tokens_per_rank=config.tokens_per_rank,
        steps=config.steps,
        seed=config.seed,
        start=start,
    )
    heads = config.attention_heads
    tqdm.set_lock(threading.RLock())  # its default is shared between processes, which nothing here needs
    with (
        stop_request() as stop,
        init(max_tokens=config.tokens_per_rank, heads=heads, timeout=config.timeout),
        PlanAhead(
            batches,
            heads=heads,
            layout=lambda batch: batch.layout,
            tolerance=config.tolerance,
            balance=config.balance == "on",
        ) as steps,
        tqdm(total=config.steps, initial=start, disable=rank != 0, unit="step", dynamic_ncols=True) as bar,
        RunLog(config, run_dir if rank == 0 else None, corpus, start=start) as log,
    ):
        begin = time.perf_counter()
        for step, (batch, plan) in enumerate(steps, start):
            assert batch is not None  # every rank has the same number of batches
            loss, interrupted = train_step(trained, batch, plan, stop)
            now = time.perf_counter()
            metrics = StepMetrics.of(step, loss, now - begin, plan, layers=config.layers)
            log.step(metrics)
            bar.set_postfix_str(metrics.line(), refresh=False)
            bar.update()
            if not math.isfinite(loss):
                raise DistcaError(f"the loss is {loss} at step {step}: lower --lr (now {config.lr:g})")
            taken = step + 1
            if (
                interrupted
                or taken == config.steps
                or (config.checkpoint_every and taken % config.checkpoint_every == 0)
            ):
                checkpoints.save(trained, RunState(taken, ranks, corpus.fingerprint()))
            if interrupted:
                break
            begin = time.perf_counter()
        return log.finish(interrupted)


def _start_of_training(config: TrainConfig) -> Trained:
    model = DistributedDataParallel(build_model(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, config.steps))
    return Trained(model, optimizer, schedule)


def _agree_on_run(run_dir: Path | None) -> tuple[Path, Path | None]:
    """Rank 0's folder of the run and its last checkpoint, of which it removes what an earlier kill has left half."""
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
    if state.corpus != corpus.fingerprint():
        raise DataError(
            f"the documents are not those of the checkpoint {last}: a resumed run needs the same --data and --doc-scale"
        )
    return state.step


def train_step(trained: Trained, batch: Batch, plan: Plan, stop: StopRequest) -> tuple[float, bool]:
    """One optimizer step. Returns the mean loss over all ranks' targets, and whether any rank was asked to stop."""
    trained.optimizer.zero_grad()
    loss_sum = sum_of_losses(trained.model, batch, plan)
    # DDP averages gradients over ranks; the loss is the mean over targets, of which ranks hold different numbers.
    num_targets = max(batch.num_targets, 1)
    (loss_sum * (dist.get_world_size() / num_targets)).backward()
    trained.optimizer.step()
    trained.schedule.step()
    shared = torch.tensor([loss_sum.item(), float(stop.requested)], dtype=torch.float64)
    dist.all_reduce(shared)
    return shared[0].item() / num_targets, shared[1].item() > 0


def sum_of_losses(model: torch.nn.Module, batch: Batch, plan: Plan) -> torch.Tensor:
    """Cross entropy summed over the targets of this rank, fp32; zero (with gradients of zero) where it has none."""
    positions = plan.layout.position_ids(plan.rank).unsqueeze(0)
    logits = model(input_ids=batch.input_ids, position_ids=positions, use_cache=False, plan=plan).logits
    return F.cross_entropy(logits[0].float(), batch.labels[0], reduction="sum")


def build_model(config: TrainConfig) -> LlamaForCausalLM:
    """A Llama with random weights, the same on every rank, whose attention layers take a plan."""
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=config.hidden,
            intermediate_size=-(-config.hidden * 8 // 3 // 32) * 32,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.tokens_per_step,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=hf.NAME,
        )
    )
    return model.to(config.torch_dtype).train()


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from 1 to 0.1."""
    warmup = min(WARMUP_STEPS, steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0))


def _check_same_corpus(corpus: Corpus) -> None:
    mine = torch.tensor([corpus.fingerprint(), len(corpus.documents)], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if not torch.equal(theirs, everyone[0]):
            raise DataError(
                f"rank {rank} has read other documents ({int(theirs[1])} of them) than rank 0 ({int(everyone[0][1])}): "
                "all ranks need the same data folder"
            )


@dataclass
class StopRequest:
    """Set once this rank was asked to stop after the current step."""

    requested: bool = False
    at: float = 0.0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; a later one ends the process at once."""
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
