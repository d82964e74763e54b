"""What in a model of transformers no plan can express. It is read from the model's configuration and modules.

A plan knows rows by document and position. Anything else in a model that looks along the rows of its tensor sees the
borders of ranks instead of those of documents. Recurrent modules run on each document by itself (hf_recurrent.py).
What else there is (positions counted by row, other convolutions) is refused here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from distca.integrations.hf_models import (
    ATTENTION,
    NO_ATTENTION,
    REFUSED,
    check_has_attention,
    kinds_of,
    own_modules,
    refuse,
    takes_plans,
)
from distca.integrations.hf_recurrent import (
    is_recurrent,
    looks_along_rows,
    looks_by_functions,
    refuse_units_inside,
    run_by_document,
)
from distca.integrations.hf_results import check_pooling, is_one_of, pools
from distca.integrations.hf_rope import watch
from distca.planner.layout import Layout

#: By model type, why a model cannot take a plan in training.
_REFUSED_IN_TRAINING = {
    "phimoe": "the router draws experts at random, and ranks would differ from one process: call model.eval()"
}
#: By the name of an option, what a model that has it does along the rows of its tensor outside of any module.
_ALONG_ROWS = {
    "token_dropout": "scales embeddings by how many rows are masked",
    "trigram_input": "takes the embeddings of a row's neighbours with its own",
}
_JITTER = ("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")
#: Models that do not hand keywords on to their layers. Only torch.compile needs this list.
_DROPS_KEYWORDS = ("bigbird_pegasus", "nemotron", "stablelm")
#: Models that do not call transformers' AttentionInterface. Only torch.compile needs this list.
_BYPASSES = ("cpmant", "openai-gpt", "prophetnet", "xlm", "xlnet")
#: The types of layers that have at least one recurrent module each.
_RECURRENT = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")


@dataclasses.dataclass(frozen=True)
class Examined:
    """What the modules of a model tell. It keeps none of them, because the model itself may be one.

    Attributes:
        recurrent: the recurrent modules, by name.
        along_rows: name and type of another module that looks along the rows of its tensor; None if there is none.
        first_position: the position of a document's first row.
        checkpointed: modules that activation checkpointing may run again.
    """

    recurrent: weakref.WeakValueDictionary[str, torch.nn.Module]
    along_rows: str | None
    first_position: int
    checkpointed: weakref.WeakSet[torch.nn.Module]


_examined: weakref.WeakKeyDictionary[PreTrainedModel, Examined] = weakref.WeakKeyDictionary()


def examine(model: PreTrainedModel) -> Examined:
    """Looks through the modules of a model's decoder, once. RoPE modules get hooks, recurrent ones another forward."""
    found = _examined.get(model)
    if found is None:
        modules = own_modules(model)
        recurrent = {name: m for name, m in modules if is_recurrent(m)}
        inside = {part for m in recurrent.values() for part in m.modules() if part is not m}
        recurrent = {name: m for name, m in recurrent.items() if m not in inside}
        for module in recurrent.values():
            run_by_document(module, functools.partial(takes_plans, model.config))
        others = ((name, m) for name, m in modules if m not in inside and looks_along_rows(m))
        along = next((f"{name} ({type(m).__name__})" for name, m in others), None)
        firsts = [int(m.padding_idx) + 1 for _, m in modules if _counts_from_padding(m)]  # type: ignore[arg-type]
        checkpointed = [m for _, m in modules if hasattr(m, "gradient_checkpointing")]
        watch(model)
        found = _examined[model] = Examined(
            weakref.WeakValueDictionary(recurrent),
            along,
            firsts[0] if firsts else 0,
            weakref.WeakSet(checkpointed),
        )
    return found


def _counts_from_padding(module: torch.nn.Module) -> bool:
    """Whether positions begin after the number of the padding token, as RoBERTa's do, and those that ESM learns."""
    makers = ("create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds")
    return hasattr(module, "position_embeddings") and any(hasattr(module, name) for name in makers)


def check_model(model: PreTrainedModel, num_ranks: int, layout: Layout | None = None) -> None:
    """Raises InvalidArgumentError if a plan cannot express something in the model. The message names it.

    Without a layout, what depends on it is not checked.
    """
    config = model.config.get_text_config()
    kind = config.model_type
    refuse(kind in REFUSED, REFUSED.get(kind, ""))
    other = next((kind for kind in kinds_of(config) if kind not in (*ATTENTION, *NO_ATTENTION)), None)
    refuse(
        other is not None,
        f"the model has layers of type {other}, which choose their keys themselves: not supported yet",
    )
    check_has_attention(kinds_of(config))
    examined = examine(model)
    _check_recurrent(config, examined, num_ranks)
    along = examined.along_rows
    refuse(
        along is not None,
        f"the model's module {along} looks along the rows of its tensor, over the borders of documents and ranks: not "
        "supported yet",
    )
    for option, what in _ALONG_ROWS.items():
        refuse(
            bool(getattr(config, option, False)),
            f"the model {what} ({option}), over the borders of documents and ranks: not supported yet",
        )
    _check_peft(model)
    if layout is not None:
        check_pooling(model, layout)
    if num_ranks > 1 and model.training:
        refuse(kind in _REFUSED_IN_TRAINING, _REFUSED_IN_TRAINING.get(kind, ""))
        jitter = next((name for name in _JITTER if getattr(config, name, None)), None)
        refuse(
            jitter is not None,
            f"the router adds random noise to its input, and ranks would differ from one process: set {jitter}=0.0 in "
            "the model's config",
        )


def _check_peft(model: PreTrainedModel) -> None:
    """Refuses adapters of a peft whose models call `forward`: what distca sees is then a model without its loss."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or not _calls_forward(peft.BaseTuner.forward):
        return
    refuse(
        any(isinstance(m, peft.BaseTunerLayer) for m in model.modules()),
        "this version of peft calls the forward of the model itself, past the checks of its loss: pip install -U peft",
    )


@functools.cache
def _calls_forward(forward: Callable[..., Any]) -> bool:
    return "self.model.forward(" in inspect.getsource(forward)


def _check_recurrent(config: PreTrainedConfig, examined: Examined, num_ranks: int) -> None:
    """Raises InvalidArgumentError if recurrent layers cannot run on each document by itself."""
    num_layers = sum(kind in _RECURRENT for kind in kinds_of(config))
    refuse(
        num_layers > len(examined.recurrent),
        f"the model has {num_layers} layers that carry a state from row to row (layer_types), and only "
        f"{len(examined.recurrent)} modules that are known to: the others would go on over the borders of documents",
    )
    for name, module in examined.recurrent.items() if num_ranks > 1 else ():
        if not looks_by_functions(module):
            refuse_units_inside(name, module)


def goes_another_way(model: PreTrainedModel) -> bool:
    """Whether a plan as a keyword is known not to be enough: the layers do not get it, or the model may be refused."""
    if pools(type(model)) or is_one_of(type(model), ("ForQuestionAnswering",)):
        return True
    config: Any = model.config.get_text_config()
    plain = ("full_attention", "attention", "sliding_attention", "chunked_attention")
    kinds = kinds_of(config)
    return (
        config.model_type in (*_DROPS_KEYWORDS, *_BYPASSES, *REFUSED)
        or any(kind not in plain for kind in kinds)
        or any(getattr(config, option, False) for option in ("attn_temperature_tuning", *_ALONG_ROWS))
    )


def drops_keywords(module: torch.nn.Module) -> bool:
    """Whether the layer's model is known not to hand keywords on to attention."""
    return getattr(getattr(module, "config", None), "model_type", None) in _DROPS_KEYWORDS
