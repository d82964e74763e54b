"""What a model computes by its own attention in one process, one document at a time; and how much mistakes would change
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import distca
from distca.integrations import hf

from . import tiny

LENGTHS = (90, 1, 30, 7)
ROWS = 64  # the rows of each of the two ranks; the longest document is cut between them
NO_TARGET = -100  # transformers' mark of a row without a target

#: Words in the names of modules of attention without a softmax.
_NOT_CORE = ("DeltaAttention", "LightningAttention", "LinearAttentionDecoderLayer")
#: How often a module of attention calls attention, for models where this is not once.
_CALLS = {"diffllama": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """An entry of transformers' table, options of its configuration, the first position of its documents, and whether
    it has recurrent layers.
    """

    entry: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    first_position: int = 0
    recurrent: bool = False

    def layout(self) -> distca.Layout:
        return distca.Layout.packed(list(LENGTHS), ranks=2, tokens_per_rank=ROWS)

    def rows(self, rank: int) -> slice:
        """Where the rank's rows lie among those of all documents."""
        begin = sum(self.layout().num_rows(r) for r in range(rank))
        return slice(begin, begin + self.layout().num_rows(rank))

    @property
    def masked(self) -> bool:
        return tiny.is_masked(self.entry)

    @property
    def sees_both_sides(self) -> bool:
        options = self.options
        return self.masked or "use_bidirectional_attention" in options or not options.get("is_causal", True)

    def plans(self, model: Any) -> distca.Plans:
        """The plans that a caller makes who follows the documentation."""
        heads, windows = hf.heads_of(model.config, torch.float32), hf.windows_of(model.config)
        return distca.plans(self.layout(), heads, windows=windows, mask=hf.mask_of(model))

    def model(self, attention: str) -> torch.nn.Module:
        return tiny.model_of(self.entry, attention, self.options)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows that are computed together. Without `positions` the model counts them itself."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Results:
    """The loss and gradients in training, the logits in evaluation, and the calls of attention in a forward pass."""

    loss: float
    grads: dict[str, torch.Tensor]
    logits: torch.Tensor
    calls: int


def documents() -> list[Piece]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, tiny.VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    return [Piece(tokens, torch.cat([tokens[1:], torch.tensor([NO_TARGET])])) for tokens in rows]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.double(), targets, ignore_index=NO_TARGET, reduction="sum")


def run(model: torch.nn.Module, tokens: torch.Tensor, **offered: Any) -> Any:
    """The model's output for rows [T]. Keywords that its forward does not take are left out."""
    offered["use_cache"] = False
    if not takes_any_keyword(model):
        taken = inspect.signature(model.forward).parameters
        offered = {name: value for name, value in offered.items() if name in taken}
    return model(tokens[None], **offered)


def takes_any_keyword(model: torch.nn.Module) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def reference(case: Case) -> Results:
    model, loss = case.model("eager"), 0.0
    with _frequencies_of_the_longest(model):
        for document in documents():
            of_document = loss_of(run(model.train(), document.tokens).logits[0], document.targets)
            of_document.backward()
            loss += of_document.item()
    with _counted_calls(model) as calls:
        logits = logits_of(model, documents())
    return Results(loss, gradients(model), logits, len(calls) // len(LENGTHS) * _CALLS.get(case.entry, 1))


def plans_by_hand(case: Case) -> distca.Plans:
    """Plans for the heads and windows that the model's layers call attention with."""
    seen: dict[int | None, distca.Heads] = {}

    def attention(module: torch.nn.Module, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        seen[options.get("sliding_window")] = distca.Heads(q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    AttentionInterface.register("seen", attention)
    AttentionMaskInterface.register("seen", sdpa_mask)
    with torch.no_grad(), contextlib.suppress(KeyError):  # some models look attention up in a table of their own
        run(case.model("seen").eval(), documents()[0].tokens)
    seen = seen or {None: distca.Heads(4, 4, 8)}
    mask = "full" if case.sees_both_sides else "causal"
    return distca.Plans(
        {window: distca.plan(case.layout(), heads, mask=mask, window=window) for window, heads in seen.items()}
    )


def mistakes(case: Case) -> dict[str, float]:
    """How much each mistake, which the comparison must notice, changes the logits relative to their norm."""
    model, whole = case.model("eager"), documents()
    counted = [torch.arange(length) + case.first_position for length in LENGTHS]
    long, rest = whole[0], whole[1:]
    again = torch.cat([counted[0][:ROWS], counted[0][: LENGTHS[0] - ROWS]])
    parts = [
        Piece(long.tokens[rows], long.targets[rows], counted[0][rows]) for rows in (slice(ROWS), slice(ROWS, None))
    ]
    together = Piece(torch.cat([d.tokens for d in whole]), torch.cat([d.targets for d in whole]), torch.cat(counted))
    wrong = {
        "each rank computes alone": [*parts, *rest],
        "documents see each other": [together],
        "positions begin again on the second rank": [dataclasses.replace(long, positions=again), *rest],
    }
    if case.recurrent:  # some of them have no positions
        del wrong["positions begin again on the second rank"]
    right = logits_of(model, whole)
    return {mistake: ((logits_of(model, rows) - right).norm() / right.norm()).item() for mistake, rows in wrong.items()}


def logits_of(model: torch.nn.Module, pieces: Sequence[Piece]) -> torch.Tensor:
    """The logits in evaluation. A mask of ones keeps transformers from inferring documents' borders from positions."""
    model.eval()
    parts = []
    with torch.no_grad(), _frequencies_of_the_longest(model):
        for piece in pieces:
            given = {}
            if piece.positions is not None:
                given = {"position_ids": piece.positions[None], "attention_mask": torch.ones(1, len(piece.tokens))}
            parts.append(run(model, piece.tokens, **given).logits[0])
    return torch.cat(parts)


@contextlib.contextmanager
def _counted_calls(model: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Yields the modules of attention that have run: the innermost modules with such a name."""

    def is_attention(module: torch.nn.Module) -> bool:
        name = type(module).__name__
        return any(word in name for word in ("Attention", "MLA")) and not any(word in name for word in _NOT_CORE)

    calls: list[torch.nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: calls.append(module))
        for module in model.modules()
        if is_attention(module) and sum(map(is_attention, module.modules())) == 1
    ]
    yield calls
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def _frequencies_of_the_longest(model: torch.nn.Module) -> Iterator[None]:
    """Inside, RoPE whose frequencies depend on the longest position takes that of the longest document for every
    document.
    """

    def one_more(positions: torch.Tensor) -> torch.Tensor:
        return torch.cat([positions, torch.full_like(positions[..., :1], max(LENGTHS) - 1)], dim=-1)

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": one_more(kwargs["position_ids"])}
        return (args[0], one_more(args[1]), *args[2:]), kwargs

    def after(_: torch.nn.Module, __: Any, output: Any) -> Any:
        """Drops the added position from cosines and sines, or from complex numbers."""
        return output[..., :-1, :] if isinstance(output, torch.Tensor) else tuple(rows[..., :-1, :] for rows in output)

    hooks = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [kinds]):
            hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    yield
    for hook in hooks:
        hook.remove()


def worst_error(ours: Results, theirs: Results, *, trained: bool, loss: float, norm: float) -> tuple[str, float]:
    """What differs most, and by how many times the allowed error: `loss` bounds the relative error of the loss, `norm`
    that of gradients and logits relative to their norms.
    """
    errors = {"logits": ((ours.logits - theirs.logits).norm() / theirs.logits.norm()).item() / norm}
    if trained:
        errors["loss"] = abs(ours.loss - theirs.loss) / abs(theirs.loss) / loss
        # Some gradients are 0 up to rounding, such as those of the biases of keys.
        floor = 1e-2 * max(gradient.norm().item() for gradient in theirs.grads.values())
        for name, wanted in theirs.grads.items():
            errors[name] = ((ours.grads[name] - wanted).norm() / (wanted.norm() + floor)).item() / norm
    return max(errors.items(), key=lambda error: math.inf if math.isnan(error[1]) else error[1])
