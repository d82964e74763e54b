"""What carries plans through Megatron-core: packed sequence parameters, and a data iterator that looks ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distca.arguments import check_type
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.integrations import megatron_names as names
from distca.integrations.megatron_config import check_config, layers_of_stages, recomputed, window_of_layer
from distca.integrations.megatron_schedule import DataWithTicks
from distca.pipeline import PipelinePlans, PipelinePlansAhead, Ticks


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
        continues: whether the first document of a batch continues the last one of the data rank before. Each rank then
            tells the length of its part. By default documents are whole.
        model: the chunks of the model on this process, for `continues`: their RoPE then takes the position of each row.
        forward_only: whether it is for evaluation: makes plans without backward.
        options: the other arguments of `PipelinePlans`.

    Raises:
        InvalidArgumentError: the configuration asks for what cannot go together with ticks.
    """

    def __init__(
        self,
        batches: Any,
        config: Any,
        *,
        context: Context,
        num_microbatches: int,
        lengths: Callable[[Any], Sequence[int]] = document_lengths,
        continues: Callable[[Any], bool] | None = None,
        model: Sequence[Any] = (),
        forward_only: bool = False,
        **options: Any,
    ) -> None:
        check_type("PlannedBatches", "context", context, Context, "distca.integrations.megatron.init(config, ...)")
        check_config(config)
        for name in ("windows", "scores", "halves"):
            if name in options:
                raise InvalidArgumentError(f"PlannedBatches: {name}= cannot be given; Megatron's configuration says it")
        batches = next((each for each in batches if each is not None), None) if isinstance(batches, list) else batches
        self.context, self._by_row = context, continues is not None
        if self._by_row:
            self._rotate_by_row(model)
        self._options: dict[str, Any] = {"scale": config.softmax_scale, "deterministic": config.deterministic_mode}
        layers = layers_of_stages(config, len(context.stages))
        windows = [window_of_layer(config, layer + 1) for layer in range(config.num_layers)]
        self._options["recompute"] = None if forward_only else recomputed(config, layers)
        self._ahead = PipelinePlansAhead(
            batches,
            heads=context.heads,
            stages=context.stages,
            lengths=lengths,
            continues=continues,
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

    def __next__(self) -> Any:
        """The micro-batch of the current tick; None on a process without data."""
        _, microbatch = self._now()
        return None if self._batches is None else self._batches[microbatch]

    def packed_seq_params(self) -> DistcaPackedSeqParams:
        """What ``forward_step_func`` passes to the model as packed_seq_params, on every process."""
        plans, microbatch = self._now()
        assert self.ticks is not None
        segments = plans.layouts[microbatch].segments(plans.index)
        sizes = [end - begin for _, begin, end in segments]
        ends = torch.tensor([0, sum(sizes)] if self._by_row else [0, *sizes]).cumsum(0)
        ends = ends.to(self.context.device, torch.int32)
        longest = max((end for _, _, end in segments), default=0)
        return DistcaPackedSeqParams(
            "thd", ends, ends, None, None, longest, longest, plan=self.ticks.plan, context=self.context
        )

    def close(self) -> None:
        """Stops the thread. It is collective."""
        self._ahead.close()

    def _now(self) -> tuple[PipelinePlans, int]:
        """The plans of the iteration, and the number of the micro-batch of the current tick."""
        if self.ticks is None or self.ticks.current.work is None:
            raise InvalidArgumentError("PlannedBatches: no tick with work is under way; pass it to tick_schedule")
        return self.ticks.plans, self.ticks.current.work.microbatch

    def _rotate_by_row(self, model: Any) -> None:
        """Lets RoPE take the position of each row. By itself Megatron counts from the first row of a segment."""
        for module in (module for chunk in model for module in chunk.modules()):
            if getattr(module, "position_embedding_type", None) in ("rope", "yarn"):
                module.rotary_pos_emb.register_forward_hook(self._of_rows)

    def _of_rows(self, module: Any, inputs: Any, output: Any) -> Any:
        if self.ticks is None or not self.ticks.is_under_way:
            return output  # the model runs with other batches
        plans, microbatch = self._now()
        positions = plans.layouts[microbatch].position_ids(plans.index).to(self.context.device)
        return (output[0][positions], *output[1:]) if isinstance(output, tuple) else output[positions]


def _first_tensor_ranks(context: Context) -> list[int]:
    """For each rank of the context the process that is first in its tensor group. All processes call it."""
    mine = context.rank if dist.get_rank(names.tensor_group()) == 0 else None
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return [of_all.index(rank) for rank in range(context.num_ranks)]
