"""A run of `pretrain_llama.py` on one rank: its model, its data, and the loop over its steps."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from distca.apps.common import memory_log
from distca.apps.common.corpus import Corpus
from distca.apps.common.files import writing
from distca.apps.common.memory_log import MemoryLog
from distca.apps.common.stopping import StopRequest
from distca.apps.pretrain import checkpoints, context_parallel
from distca.apps.pretrain.batches import LocalBatches, repeated
from distca.apps.pretrain.data import MicroBatches, read_documents
from distca.apps.pretrain.log import RunLog, Step, peak_flops
from distca.apps.pretrain.model import chunks_of_model, optimizer_of
from distca.apps.pretrain.options import Options
from distca.apps.pretrain.shapes import configuration, shape_of
from distca.context import Context
from distca.errors import DistcaError, InvalidArgumentError
from distca.integrations.megatron import PlannedBatches, init, tick_schedule
from distca.trace import nsys
from distca.trace.nsys import Capture, switched_on

Batch = dict[str, torch.Tensor]
#: Steps that Nsight Systems records, after the first.
CAPTURED_STEPS = 10


class Run:
    """The model, its optimizer and the data of this rank.

    Args:
        options: resolved options.
        run_dir: the folder of the run. A checkpoint in it is read.
        cuda: whether it runs on a GPU.
        name: the name of distca's context.

    Attributes:
        context: distca's context; None with Megatron's attention.
    """

    def __init__(self, options: Options, run_dir: Path, *, cuda: bool, name: str = "default") -> None:
        self._options, self._run_dir, self._cuda = options, run_dir, cuda
        self._shape = shape_of(options)
        self._corpus, held_out, needed = read_documents(options)
        self._vocabulary = self._shape.vocabulary or needed or int(self._corpus.tokens.max()) + 1
        if needed > self._vocabulary:
            raise InvalidArgumentError(
                f"--model (MODEL) is {options.model}, whose vocabulary of {self._vocabulary} is too small for the "
                f"tokenizer's {needed}"
            )
        self._config = configuration(self._shape, options, cuda=cuda)
        self._chunks = chunks_of_model(self._config, self._shape, self._vocabulary, options, cuda=cuda)
        no_sync = [chunk.no_sync for chunk in self._chunks]
        self._config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._config.finalize_model_grads_func = finalize_model_grads
        self._optimizer, self._schedule = optimizer_of(self._chunks, options)
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._start = self._resume()
        self.context: Context | None = None
        self._forward_backward: Callable[..., list[Batch]] = get_forward_backward_func()
        if options.attention == "distca":
            self.context = init(
                self._config,
                max_tokens=options.tokens_per_rank,
                timeout=options.timeout,
                transport=options.transport,
                name=name,
            )
            self._forward_backward = tick_schedule
        self._shared: dist.ProcessGroup | None = None
        if options.attention == "megatron" and options.cp_size > 1:
            data_group = parallel_state.get_data_parallel_group()
            self._shared = context_parallel.group_of(dist.get_process_group_ranks(data_group), options.cp_size)
        rank = dist.get_rank()
        file = run_dir / f"memory-rank{rank}.jsonl" if switched_on(memory_log.VARIABLE) else None
        self._memory = MemoryLog(file, self.context)
        self._batches = self._data_iterator(lambda: self._micro_batches(self._corpus, self._start))
        self._held_out: Any = None
        if held_out is not None:
            count = options.eval_steps * options.micro_batches
            self._held_out = self._data_iterator(
                lambda: repeated(lambda: self._micro_batches(held_out, 0), count), forward_only=True
            )

    def close(self) -> None:
        """Stops the threads that plan, and closes the context. It is collective."""
        for each in (self._batches, self._held_out):
            if isinstance(each, PlannedBatches):
                each.close()
        if self.context is not None:
            self.context.close()

    def all_steps(self, stop: StopRequest) -> bool:
        """Takes all steps that are left. Returns whether it was stopped before the last one."""
        options = self._options
        write_options(options, self._run_dir)
        peak = peak_flops(torch.cuda.get_device_name()) if self._cuda else None
        log = RunLog(
            self._run_dir if dist.get_rank() == 0 else None,
            steps=options.steps,
            start=self._start,
            peak=peak and peak * dist.get_world_size(),
        )
        with log, self._memory, closing(Capture(switched_on(nsys.VARIABLE), CAPTURED_STEPS)) as capture:
            if self._start:
                log.say(f"resumed after step {self._start}")
            for number in range(self._start + 1, options.steps + 1):
                self._memory.step(number)
                step, stopped = self.step(number, stop)
                capture.step(number + 1)
                last = number == options.steps
                for name, value in (("loss", step.loss), ("gradient norm", step.grad_norm)):
                    if not math.isfinite(value):
                        log.step(step)
                        raise DistcaError(
                            f"the {name} is {value} at step {number}: lower --lr (LR, now {options.lr:g})"
                        )
                if stopped or last or _due(number, options.save_every):
                    state = checkpoints.State(number, self._corpus.fingerprint, self._fixed())
                    keep = options.keep_checkpoints
                    checkpoints.save(self._run_dir, state, self._chunks, self._optimizer, keep=keep)
                if self._held_out is not None and (last or (not stopped and _due(number, options.eval_every))):
                    step = replace(step, eval_loss=self._evaluate())
                log.step(step)
                if stopped and not last:
                    log.say(f"stopped after step {number}; the same command with RUN_DIR={self._run_dir} goes on")
                    return True
            log.say(f"finished; log, TensorBoard events and checkpoints are in {self._run_dir}")
        return False

    def step(self, number: int, stop: StopRequest | bool = False) -> tuple[Step, bool]:
        """Takes a step. Returns its figures, and whether any rank was asked to stop. It is collective."""
        begin = time.perf_counter()
        self._memory.begin(lambda rank: {})
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        kept = self._iteration(self._batches, forward_only=False)
        self._memory.note("forward and backward")
        self._schedule.step(increment=1)
        rate = max(group["lr"] for group in self._optimizer.param_groups)
        _, norm, _ = self._optimizer.step()
        self._memory.note("optimizer")
        loss, targets, flops, stopped = self._totals(kept, stop)
        ticks = self._batches.ticks if isinstance(self._batches, PlannedBatches) else None
        stats = None if ticks is None else ticks.plans.stats
        return Step(
            step=number,
            loss=loss / max(targets, 1),
            grad_norm=float(norm),
            lr=float(rate),
            tokens=parallel_state.get_data_parallel_world_size()
            * self._options.micro_batches
            * self._options.tokens_per_rank,
            seconds=time.perf_counter() - begin,
            flops=flops,
            imbalance_before=None if stats is None else stats.imbalance_before,
            imbalance_after=None if stats is None else stats.imbalance_after,
            bytes=None if stats is None else stats.bytes,
        ), bool(stopped)

    def _evaluate(self) -> float:
        """The mean loss over targets that are held out."""
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for _ in range(self._options.eval_steps):
                sums += torch.tensor(self._totals(self._iteration(self._held_out, forward_only=True))[:2])
        return float(sums[0] / sums[1].clamp(min=1))

    def _iteration(self, batches: Any, *, forward_only: bool) -> list[Batch]:
        """Forward, and backward unless `forward_only`, of all micro-batches of a step."""
        return self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=self._options.micro_batches,
            seq_length=self._options.tokens_per_rank,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward_step(self, data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        """What Megatron's schedules and `tick_schedule` call for a micro-batch."""
        batch: Batch = next(data_iterator)
        flops = self._shape.flops(batch["position_ids"], self._vocabulary)
        if self._cuda:
            batch = {name: each.cuda(non_blocking=True) for name, each in batch.items()}
        output = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=data_iterator.packed_seq_params(),
        )

        def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            loss, targets = (losses.float() * batch["loss_mask"]).sum(), batch["loss_mask"].sum().int()
            return loss, targets, {"loss": loss.detach(), "targets": targets, "flops": flops}

        return output, loss_func

    def _totals(self, kept: list[Batch], stop: StopRequest | bool = False) -> list[float]:
        """Sums over all ranks of losses, targets and floating-point operations, and of requests to stop."""
        mine = torch.zeros(4, dtype=torch.float64)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for each in kept:  # on the last stage
                mine[:3] += torch.tensor([float(each[name]) for name in ("loss", "targets", "flops")])
        mine[3] = float(bool(stop))  # read here, where it is shared: a signal may come during the step
        dist.all_reduce(mine)
        return mine.tolist()

    def _micro_batches(self, corpus: Corpus, start: int) -> Iterator[Batch]:
        options = self._options
        return MicroBatches(
            corpus,
            rank=parallel_state.get_data_parallel_rank(),
            ranks=parallel_state.get_data_parallel_world_size(),
            micro_batches=options.micro_batches,
            tokens=options.tokens_per_rank,
            longest=options.max_document,
            vocabulary=self._vocabulary,
            seed=options.seed,
            start=start,
            context=options.cp_size,
            cut=options.cut,
            multiple=options.row_multiple,
        )

    def _data_iterator(self, make: Callable[[], Iterator[Batch]], *, forward_only: bool = False) -> Any:
        """What the schedule takes micro-batches from; for Megatron's own one for each chunk."""
        options = self._options
        if self.context is None:
            each = [LocalBatches(make(), chunk, self._shared) for chunk in self._chunks]
            return each if len(each) > 1 else each[0]
        return PlannedBatches(
            make(),
            self._config,
            context=self.context,
            num_microbatches=options.micro_batches,
            forward_only=forward_only,
            segments=(lambda batch: batch["segments"].tolist()) if options.cp_size > 1 else None,
            tolerance=options.tolerance,
            reduce_dtype=getattr(torch, options.attention_reduce_dtype),
            balance=options.balance,
            ping_pong=options.ping_pong,
        )

    def _resume(self) -> int:
        """Reads the last checkpoint of the run, if there is one. Returns the number of steps that were taken."""
        if dist.get_rank() == 0:
            checkpoints.remove_unfinished(self._run_dir)
        whole = checkpoints.whole_checkpoints(self._run_dir)
        if not whole:
            return 0
        state = checkpoints.load(
            whole[-1], self._chunks, self._optimizer, documents=self._corpus.fingerprint, fixed=self._fixed()
        )
        if state.step >= self._options.steps:
            raise InvalidArgumentError(
                f"--steps (STEPS) is {self._options.steps}, and the run in {self._run_dir} has taken {state.step}: ask "
                "for more, or name another --run-dir (RUN_DIR)"
            )
        for group in self._optimizer.param_groups:  # those of the checkpoint, which may be of another rate
            group["max_lr"], group["min_lr"] = self._schedule.max_lr, self._schedule.min_lr
        self._schedule.step(increment=state.step)
        return state.step

    def _fixed(self) -> dict[str, Any]:
        """What a resumed run must have as well, by name."""
        options = self._options
        names = (
            "model",
            "layers",
            "tokens_per_rank",
            "max_document",
            "cp_size",
            "eval_fraction",
            "seed",
            "distributed_optimizer",
        )
        return {name.upper(): getattr(options, name) for name in names} | {
            "MICRO_BATCHES times the data ranks": options.micro_batches * parallel_state.get_data_parallel_world_size()
        }


def write_options(options: Options, run_dir: Path) -> None:
    """Writes the options of a run that begins, on rank 0."""
    file = run_dir / "options.json"
    if dist.get_rank() == 0:
        with writing(file):
            file.write_text(json.dumps(options.as_json(), indent=2) + "\n", encoding="utf-8")


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
