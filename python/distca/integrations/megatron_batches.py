"""What carries plans through Megatron-core: packed sequence parameters, and a data iterator that looks ahead."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from distca.arguments import check_type
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.integrations import megatron_names as names
from distca.integrations.megatron_config import (
    asks_for_max_logits,
    check_config,
    layers_of_stages,
    recomputed,
    window_of_layer,
)
from distca.integrations.megatron_ping_pong import halves_for
from distca.integrations.megatron_schedule import DataWithTicks
from distca.pipeline import PipelinePlans, PipelinePlansAhead, Ticks
from distca.planner.layout import PADDING, Layout


@dataclass
class DistcaPackedSeqParams(names.PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed sequence parameters, with the plan of their rows.

    Attributes:
        plan: a `distca.Plan`, or what finds it: while ticks are under way (`TickPlan`), or by the layer's window
            (`distca.Plans`).
        context: the context that runs it, or its name.
        by_row: whether RoPE has the position of each row (`rotate_by_row`).
    """

    plan: Any = None
    context: Context | str = "default"
    by_row: bool = False

    def of_rows(self, layout: Layout, rank: int, plan: Any) -> DistcaPackedSeqParams:
        """The parameters of a rank's rows of a layout, with this plan of them. Each row of padding is a document."""
        sizes: list[int] = []
        segments = layout.segments(rank)
        for document, begin, end in segments:
            sizes += [end - begin] if document != PADDING else [1] * (end - begin)
        assert isinstance(self.context, Context)
        ends = torch.tensor([0, sum(sizes)] if self.by_row else [0, *sizes]).cumsum(0)
        ends = ends.to(self.context.device, torch.int32)
        longest = max((end for _, _, end in segments), default=0)
        known: dict[str, Any] = {"cu_seqlens_q": ends, "max_seqlen_q": longest}
        known |= {"cu_seqlens_kv": ends, "max_seqlen_kv": longest}
        return dataclasses.replace(self, **known, plan=plan)


def document_lengths(batch: Any) -> list[int]:
    """The lengths of the documents of a batch with ``cu_seqlens``, as Megatron-LM's packed data sets have them."""
    return [length for length in batch["cu_seqlens"].flatten().diff().tolist() if length > 0]


class PlannedBatches(DataWithTicks):
    """A data iterator for `tick_schedule`: looks ahead at the micro-batches of an iteration, and makes their plans.

    It takes the place of Megatron's data iterator, also in the place of a list of them. All processes make it, those
    without data too, and use it in step. ``next`` gives ``forward_step_func`` the micro-batch of the current tick.
    The plans of the next iteration are made in a thread while the current one is computed.

    Args:
        batches: Megatron's data iterator, a list of them for virtual stages (all yield the same), or None. The first
            process of each tensor group of the first stage has one.
        config: the model's TransformerConfig.
        context: of `init`.
        num_microbatches: micro-batches of an iteration.
        lengths: the lengths of the documents in a batch, in the order of its rows. Rows of padding are a document. By
            default `document_lengths`.
        continues: whether the first document of a batch continues the last one of the data rank before. Each rank then
            tells the length of its part. By default documents are whole.
        segments: in place of `lengths`, the segments ``(document, begin, end)`` of a batch, in the order of its rows,
            for documents that are cut in any other way, as in `distca.PlanAhead`.
        forward_only: whether it is for evaluation: makes plans without backward.
        ping_pong: whether `tick_schedule` runs the layers on two halves of a micro-batch in turns.
        options: the other arguments of `PipelinePlans`.

    Raises:
        InvalidArgumentError: the configuration asks for what cannot go together with ticks, or with ping-pong.
        ImportError: ping-pong needs the package greenlet.
    """

    def __init__(
        self,
        batches: Any,
        config: Any,
        *,
        context: Context,
        num_microbatches: int,
        lengths: Callable[[Any], Sequence[int]] | None = None,
        continues: Callable[[Any], bool] | None = None,
        segments: Callable[[Any], Sequence[tuple[int, int, int]]] | None = None,
        forward_only: bool = False,
        ping_pong: bool = False,
        **options: Any,
    ) -> None:
        check_type("PlannedBatches", "context", context, Context, "distca.integrations.megatron.init(config, ...)")
        check_config(config)
        for name in ("windows", "scores", "halves"):
            if name in options:
                raise InvalidArgumentError(f"PlannedBatches: {name}= cannot be given; Megatron's configuration says it")
        batches = next((each for each in batches if each is not None), None) if isinstance(batches, list) else batches
        self.context, self._by_row = context, continues is not None or segments is not None
        self._options: dict[str, Any] = {"scale": config.softmax_scale, "deterministic": config.deterministic_mode}
        self._options["max_logits"] = asks_for_max_logits(config)
        layers = layers_of_stages(config, len(context.stages))
        windows = [window_of_layer(config, layer + 1) for layer in range(config.num_layers)]
        self._options["recompute"] = None if forward_only else recomputed(config, layers)
        if ping_pong:
            options["halves"] = halves_for(config, windows)
        self._ahead = PipelinePlansAhead(
            batches,
            heads=context.heads,
            stages=context.stages,
            lengths=document_lengths if lengths is None and segments is None else lengths,
            continues=continues,
            segments=segments,
            microbatches=num_microbatches,
            tellers=_first_tensor_ranks(context),
            rank=context.rank,
            layers=layers,
            chunks=config.virtual_pipeline_model_parallel_size or 1,
            windows=windows,
            backward=not forward_only,
            context=context,
            **options,
        )
        self._iterations = iter(self._ahead)
        self._batches: list[Any] | None = None
        self.ticks: Ticks | None = None

    def begin(self) -> Ticks:
        """The ticks of the next iteration. `tick_schedule` calls it. Raises StopIteration at the end of the data."""
        self._batches, plans = next(self._iterations)
        self.ticks = Ticks(plans, context=self.context, **self._options)
        return self.ticks

    @contextlib.contextmanager
    def positioned(self, chunks: Sequence[Any]) -> Iterator[None]:
        """In `with`, RoPE of these chunks takes the position of each row, if documents may be cut."""
        handles = [each for chunk in chunks if self._by_row for each in rotate_by_row(chunk, self._positions)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __next__(self) -> Any:
        """The micro-batch of the current tick; None on a process without data."""
        _, microbatch = self._now()
        return None if self._batches is None else self._batches[microbatch]

    def packed_seq_params(self) -> DistcaPackedSeqParams:
        """What ``forward_step_func`` passes to the model as packed_seq_params, on every process."""
        plans, microbatch = self._now()
        assert self.ticks is not None
        packed = DistcaPackedSeqParams("thd", context=self.context, by_row=self._by_row)
        return packed.of_rows(plans.layouts[microbatch], plans.index, self.ticks.plan)

    def close(self) -> None:
        """Stops the thread. It is collective."""
        self._ahead.close()

    def _now(self) -> tuple[PipelinePlans, int]:
        """The plans of the iteration, and the number of the micro-batch of the current tick."""
        if self.ticks is None or self.ticks.current.work is None:
            raise InvalidArgumentError("PlannedBatches: no tick with work is under way; pass it to tick_schedule")
        return self.ticks.plans, self.ticks.current.work.microbatch

    def _positions(self) -> torch.Tensor:
        """The positions of the rows in their documents."""
        plans, microbatch = self._now()
        return plans.layouts[microbatch].position_ids(plans.index)


def rotate_by_row(chunk: Any, positions: Callable[[], torch.Tensor | None]) -> list[RemovableHandle]:
    """Lets RoPE of a chunk of the model take the position of each row, where `positions` knows them, until the returned
    hooks are removed.

    By itself Megatron counts from the first row of a segment. The packed sequence parameters must have one segment.
    """

    def of_rows(module: Any, inputs: Any, output: Any) -> Any:
        rows = positions()
        if rows is None:
            return output
        frequencies, *others = output if isinstance(output, tuple) else (output,)
        frequencies = frequencies[rows.to(frequencies.device)]
        return (frequencies, *others) if others else frequencies

    return [
        module.rotary_pos_emb.register_forward_hook(of_rows)
        for module in chunk.modules()
        if getattr(module, "position_embedding_type", None) in ("rope", "yarn")
    ]


def _first_tensor_ranks(context: Context) -> list[int]:
    """For each rank of the context the process that is first in its tensor group. All processes call it."""
    mine = context.rank if dist.get_rank(names.tensor_group()) == 0 else None
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return [of_all.index(rank) for rank in range(context.num_ranks)]
