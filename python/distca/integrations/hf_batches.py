"""Plans for the batches of a training loop: `PlanInputs` for a `transformers.Trainer`, `plan_inputs` for any other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.integrations.hf_bidirectional import bidirectional_rows, in_sliding_layers_alone
from distca.integrations.hf_limits import examine
from distca.integrations.hf_models import differ_in_heads, mask_of, refuse, windows_of
from distca.integrations.hf_ping_pong import InHalves, plan_halves
from distca.planner.exchange import gathered_lengths
from distca.planner.layout import Layout
from distca.planner.planning import plans
from distca.planner.telling import TellsBidirectional, TellsLengths
from distca.registry import get_context


class PlanInputs:
    """A base class that makes a Trainer plan every batch, in training and in evaluation. Put it first::

        class Trainer(distca.integrations.hf.PlanInputs, transformers.Trainer):
            pass

    `plan_inputs` says what a batch must be, and what is refused.
    """

    distca_context: ClassVar[str] = "default"
    """Name of the context. Make it by `distca.init` once the TrainingArguments have initialised `torch.distributed`."""
    plan_options: ClassVar[dict[str, Any]] = {}
    """Further arguments of `distca.plan`: tolerance, min_rows, retain_bytes."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        model = self.model  # type: ignore[attr-defined]
        return plan_inputs(inputs, model, distca_context=self.distca_context, **self.plan_options)


def plan_inputs(
    inputs: Mapping[str, Any], model: Any, *, distca_context: str = "default", **plan_options: Any
) -> dict[str, Any]:
    """The keyword arguments of a model for a batch: those of the collator, and the plan of all ranks' batches::

        loss = model(**distca.integrations.hf.plan_inputs(batch, model), use_cache=False).loss

    It is for training loops other than a transformers.Trainer, which `PlanInputs` serves. All ranks call it for each
    batch. They exchange the lengths over a gloo group of their own. The context must have all processes.

    Args:
        inputs: a rank's batch: whole documents packed into one row, with their position_ids [1, T], as transformers'
            DataCollatorWithFlattening makes it from documents of any length.
        model: the model of transformers, or a PEFT model around it, without wrappers such as DDP. Windows come from its
            configuration. A model that went through `ping_pong` gets a plan for each half.
        distca_context: the context's name. Heads come from the context: make it with those of `heads_of`.
        plan_options: further arguments of `distca.plan`: tolerance, min_rows, retain_bytes.

    Returns:
        `inputs`, with `plan` and `distca_context` for the model's forward. Its position_ids are counted from where the
        model begins to count (RoBERTa).

    Raises:
        InvalidArgumentError: on all ranks, if one rank's batch is packed in another way; there is no such context, or
            it does not have all processes.
        PeerLeftError: another rank's batch raised another error, which the message repeats.
        PeerDiedError, PeerTimeoutError: a rank has ended, or has no further batch.
    """
    context = context_of_all(distca_context)
    told = gathered_lengths(lambda: _told(model.config, inputs), context.lengths_exchange)
    base = without_adapters(model)
    made = plan_of(base, _TELLING.layout(told, [0] * len(told)), context, plan_options)
    positions = inputs["position_ids"] + examine(base).first_position
    return {**inputs, "position_ids": positions, "plan": made, "distca_context": distca_context}


def without_adapters(model: Any) -> Any:
    """The model that PEFT goes around, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def context_of_all(name: str) -> Context:
    """The context of this name. It must have all processes, because all exchange lengths.

    Raises:
        InvalidArgumentError: there is no such context, or it does not have all processes.
    """
    context = get_context(name)
    if context is None:
        raise InvalidArgumentError(f"no context {name!r}: call distca.init before training")
    num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if context.global_ranks != [*range(num_processes)]:
        raise InvalidArgumentError(
            f"context {context.name!r} has the processes {context.global_ranks} of {num_processes}; all are expected, "
            "because all exchange lengths: call distca.init in each process, once torch.distributed is initialised, "
            "and without group="
        )
    return context


def plan_of(model: PreTrainedModel, layout: Layout, context: Context, plan_options: Mapping[str, Any]) -> Any:
    """The plans of a layout for a model: those of halves if it went through `ping_pong`."""
    make = plan_halves if isinstance(model, InHalves) else plans
    windows = windows_of(model.config)
    options: dict[str, Any] = {"context": context, "mask": mask_of(model), **plan_options}
    refuse(
        isinstance(context.layer_heads, Heads) and differ_in_heads(model.config),
        f"layers of the model differ in their heads, and context {context.name!r} was made with heads of one shape: "
        "give distca.init heads=distca.integrations.hf.heads_of(model.config, dtype)",
    )
    if in_sliding_layers_alone(model.config):
        options["bidirectional_windows"] = [window for window in windows if window is not None]
    return make(layout, context.layer_heads, windows=windows, **options)


#: How a rank's numbers become a layout; what it tells is found by `_told`.
_TELLING = TellsBidirectional("plan_inputs", TellsLengths("plan_inputs", list), list)


def _told(config: Any, inputs: Mapping[str, Any]) -> list[int]:
    lengths = _packed_lengths(inputs.get("position_ids"))
    ranges = bidirectional_rows(config, inputs, lengths)
    return [len(ranges) // 3, *ranges, *lengths]


def _packed_lengths(position_ids: Any) -> list[int]:
    """The lengths of whole documents that are packed into one row, from their positions [1, T]."""
    asked = (
        "use DataCollatorWithFlattening, which packs a batch's documents into one row (in TRL: packing=True or "
        "padding_free=True), or hf.unpad(model) in place of PlanInputs, which takes padded batches"
    )
    refuse(not isinstance(position_ids, torch.Tensor), f"the batch has no position_ids: {asked}")
    refuse(position_ids.dim() != 2 or len(position_ids) != 1, f"position_ids are {list(position_ids.shape)}: {asked}")
    starts = [*(position_ids[0] == 0).nonzero().flatten().tolist(), position_ids.shape[1]]
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    whole = torch.cat([torch.arange(length, device="cpu") for length in (starts[0], *lengths)])
    refuse(
        starts[0] != 0 or not torch.equal(whole, position_ids[0].cpu()),
        f"position_ids do not count each document from 0: {asked}",
    )
    return lengths
