"""What carries plans through Megatron-core: packed sequence parameters, and a data iterator that looks ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from distca.arguments import check_type
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.integrations import megatron_names as names
from distca.integrations.megatron_config import check_config, layers_of_stages, recomputed, window_of_layer
from distca.integrations.megatron_ping_pong import halves_for
from distca.integrations.megatron_schedule import DataWithTicks
from distca.pipeline import PipelinePlansAhead, Ticks
from distca.planner.exchange import Exchange
from distca.planner.layout import PADDING, Layout


@dataclass
class DistcaPackedSeqParams(names.PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed sequence parameters, with the plan of their rows.

    Attributes:
        plan: a `distca.Plan`, or what finds it: while ticks are under way (`TickPlan`), or by the layer's window
            (`distca.Plans`).
        context: the context that runs it, or its name.
    """

    plan: Any = None
    context: Context | str = "default"

    def of_rows(self, layout: Layout, rank: int, plan: Any) -> DistcaPackedSeqParams:
        """The parameters of a rank's rows of a layout, with this plan of them. Each row of padding is a document."""
        sizes: list[int] = []
        for document, begin, end in layout.segments(rank):
            sizes += [end - begin] if document != PADDING else [1] * (end - begin)
        assert isinstance(self.context, Context)
        ends = torch.tensor([0, *sizes]).cumsum(0).to(self.context.device, torch.int32)
        longest = max(sizes, default=0)
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
        lengths: the lengths of the documents in a batch, in the order of its rows. Rows of padding are a document.
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
        lengths: Callable[[Any], Sequence[int]] = document_lengths,
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
        layers = layers_of_stages(config, len(context.stages))
        windows = [window_of_layer(config, layer + 1) for layer in range(config.num_layers)]
        if ping_pong:
            options["halves"] = halves_for(config, windows)
        self.context = context
        recompute = None if forward_only else recomputed(config, layers)
        self._options: dict[str, Any] = {
            "scale": config.softmax_scale,
            "deterministic": config.deterministic_mode,
            "recompute": recompute,
        }
        of_context, of_tensor = _private_groups(context)
        tensor_rank = dist.get_rank(of_tensor)
        has_data = [batches is not None]
        dist.broadcast_object_list(has_data, group=of_tensor, group_src=0)
        self._ahead = PipelinePlansAhead(
            _told(batches, lengths, num_microbatches, of_tensor, tensor_rank) if has_data[0] else None,
            heads=context.heads,
            stages=context.stages,
            lengths=lambda pair: pair[1],
            microbatches=num_microbatches,
            group=Exchange.over(of_context),
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
        loaded, plans = next(self._iterations)
        self._batches = None if loaded is None else [batch for batch, _ in loaded]
        self.ticks = Ticks(plans, context=self.context, **self._options)
        return self.ticks

    def __next__(self) -> Any:
        """The micro-batch of the current tick; None on a process without data."""
        microbatch = self._microbatch()
        return None if self._batches is None else self._batches[microbatch]

    def packed_seq_params(self) -> DistcaPackedSeqParams:
        """What ``forward_step_func`` passes to the model as packed_seq_params, on every process."""
        microbatch = self._microbatch()
        assert self.ticks is not None
        plans = self.ticks.plans
        packed = DistcaPackedSeqParams("thd", context=self.context)
        return packed.of_rows(plans.layouts[microbatch], plans.index, self.ticks.plan)

    def close(self) -> None:
        """Stops the thread. It is collective."""
        self._ahead.close()

    def _microbatch(self) -> int:
        """The number of the micro-batch of the current tick."""
        if self.ticks is None or self.ticks.current.work is None:
            raise InvalidArgumentError("PlannedBatches: no tick with work is under way; pass it to tick_schedule")
        return self.ticks.current.work.microbatch


def _told(
    batches: Any, lengths: Callable[[Any], Sequence[int]], count: int, group: dist.ProcessGroup, rank: int
) -> Iterator[tuple[Any, list[int]]]:
    """Batches with the lengths that the first process of the tensor group tells the others, an iteration at a time."""
    while True:
        told: list[Any] = [None]
        try:
            mine = [] if batches is None else list(islice(batches, count))
            told = [[list(lengths(batch)) for batch in mine]] if rank == 0 else told
        finally:  # the others hear of an error as of the end
            dist.broadcast_object_list(told, group=group, group_src=0)
        of_first = told[0] or []
        if len(of_first) < count:
            return
        yield from zip(mine or [None] * count, of_first, strict=True)


def _private_groups(context: Context) -> list[dist.ProcessGroup]:
    """Gloo groups of the context's processes and of this one's tensor group. All processes make those of all."""
    mine = [context.global_ranks, dist.get_process_group_ranks(names.tensor_group())]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    groups = {
        ranks: dist.new_group(list(ranks), backend="gloo")
        for ranks in sorted({tuple(r) for one in of_all for r in one})
    }
    return [groups[tuple(ranks)] for ranks in mine]
