"""The masks that models of transformers ask for: most are never built, because a plan says what rows see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import sdpa_mask

from distca.errors import InvalidArgumentError
from distca.integrations.hf_bidirectional import AskedMask, difference
from distca.integrations.hf_models import NAME
from distca.planner.layout import Layout

#: All of a dimension, as in mask[:, :, rows, :].
_ALL = slice(None)


class _Unions(TorchFunctionMode):
    """Notices whether a union of masks is computed inside. A graph cannot look into functions, but it can call them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func.__name__ in ("__or__", "bitwise_or", "logical_or")
        return func(*args, **(kwargs or {}))


class DeferredMask:
    """The mask that transformers asked for. It is built only if a layer needs it.

    transformers makes the mask before any layer runs, when the plan is not known. With a plan, layers only ask whether
    the request goes beyond what the plan expresses. Without a plan, the first layer builds the mask and the others
    share it.

    Args:
        request: what transformers asked for.
        rows: the query rows of the mask that are left, if a model has left out others on the way.
    """

    def __init__(self, request: dict[str, Any], rows: slice = _ALL) -> None:
        self._request = request
        self._rows = rows
        self._mask: torch.Tensor | None = None
        self._built = False
        self._objection: str | None = None
        self._examined = False
        self._asked: AskedMask | None = None
        self._compared: dict[tuple[Any, ...], str | None] = {}

    def build(self) -> torch.Tensor | None:
        """The boolean mask [1, 1, q, kv] for SDPA, or None if SDPA's own causal flag says the same."""
        if not self._built:
            self._mask, self._built = sdpa_mask(**self._request | self._of_rows()), True
        return self._mask

    def _of_rows(self) -> dict[str, Any]:
        """What the request for the rows that are left has in place of that for all."""
        if not self.is_part:
            return {}
        offset, rows = self._request.get("q_offset", 0), range(self._request["q_length"])[self._rows]
        # SDPA takes a row alone for one that sees all keys, and its flag is for as many rows as keys.
        is_last = len(rows) == 1 and rows.stop == self._request["q_length"]
        skip = is_last and self._request.get("allow_is_causal_skip", True)
        return {"q_length": len(rows), "q_offset": offset + rows.start, "allow_is_causal_skip": skip}

    def objection(self) -> str | None:
        """Why a plan cannot take the place of this mask; None if it can."""
        if torch.compiler.is_compiling():  # this costs nothing at run time, while the two flags would be guarded
            return self._examine()
        if not self._examined:
            self._objection, self._examined = self._examine(), True
        return self._objection

    @property
    def is_part(self) -> bool:
        """Whether the model has left out rows of the mask that it asked for."""
        return self._rows != _ALL

    def has_blocks(self) -> bool:
        """Whether it is a causal mask with blocks. The layer's own word on causality then does not count."""
        asked = self._asked_mask()
        return asked.is_known and asked.blocks is not None

    @property
    def is_full(self) -> bool:
        """Whether the model asks that rows see those after them as they see those before them."""
        if torch.compiler.is_compiling():  # only such requests have this key
            return "allow_is_bidirectional_skip" in self._request
        return self._asked_mask().is_full

    def difference(self, layout: Layout, rank: int, window: int | None, may_ask_none: bool) -> str | None:
        """In what the mask differs from what a layout says of rows that see those after them; None if it does not."""
        key = (id(layout), rank, window, may_ask_none)
        if key not in self._compared:
            self._compared[key] = difference(self._asked_mask(), layout, rank, window, may_ask_none)
        return self._compared[key]

    def _examine(self) -> str | None:
        padding: torch.Tensor | None = self._request.get("attention_mask")
        if padding is not None and (torch.compiler.is_compiling() or not bool(padding.all())):
            return (
                "attention_mask marks padding, which would be dropped silently: pass no attention_mask; "
                "padding rows belong in the plan's layout, as segments of document -1. hf.unpad(model) takes padded "
                "batches, without a plan"
            )
        own = "the model lays a mask of its own (or_mask_function or and_mask_function) over the causal one"
        if torch.compiler.is_compiling():
            if self._request.get("use_vmap"):
                return f"{own}, which a graph cannot see into: call it without torch.compile"
            # A graph cannot ask for values. Without vmap, transformers adds nothing but blocks to the causal mask.
            if self._is_union():
                return (
                    "the model may ask for a mask that is not causal (blocks of a prefix or an image), which a graph "
                    "cannot see: call it without torch.compile"
                )
            return None
        asked = self._asked_mask()
        if self._request.get("use_vmap") and not asked.is_known:
            return own
        if asked.is_full:
            return None if asked.is_known else "the model asks for a full mask with functions of its own"
        if not self.has_blocks() and self._sees_future():
            return "the model asks for a mask that is not causal"
        return None

    def _asked_mask(self) -> AskedMask:
        if self._asked is None:
            self._asked = AskedMask(self._request["mask_function"])
        return self._asked

    def _sees_future(self) -> bool:
        """Whether any row may see the row after it, as in bidirectional models and blocks of image tokens."""
        rows = torch.arange(max(self._request["q_length"] - 1, 0), device=self._request.get("device"))
        batch = torch.zeros_like(rows)
        mask_function: Callable[..., torch.Tensor] = self._request["mask_function"]
        return bool(mask_function(batch, batch, rows, rows + 1).any())

    def _is_union(self) -> bool:
        """Whether something is added to the causal mask, which windows and documents only take from."""
        row, unions = torch.zeros(1, dtype=torch.long, device=self._request.get("device")), _Unions()
        with unions:
            self._request["mask_function"](row, row, row, row)
        return unions.found

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Refuses a model that computes with the mask itself: its attention cannot be replaced."""
        _refuse_mask("adds it to its attention scores")

    def __getitem__(self, part: Any) -> DeferredMask:
        """The mask of some query rows [:, :, rows, :], which models ask for that leave out the other rows."""
        is_of_rows = isinstance(part, tuple) and len(part) == 4 and all(isinstance(of, slice) for of in part)
        if not is_of_rows or self.is_part or [part[0], part[1], part[3]] != [_ALL] * 3:
            _refuse_mask("takes parts of it")
        rows = range(self._request["q_length"])[part[2]]
        if rows.step != 1:
            _refuse_mask("takes parts of it")
        return self if len(rows) == self._request["q_length"] else DeferredMask(self._request, part[2])

    def to(self, *_: Any, **__: Any) -> DeferredMask:
        """The mask itself: hooks of accelerate move all arguments of a layer. The layer that builds it moves it."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and its libraries ask any object for these
            raise AttributeError(name)
        _refuse_mask(f"asks for .{name}")

    ndim = 4  # that a mask was made already is what transformers sees by this

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of the mask. A model inside another one asks for it, and then for a mask again (`distca_mask`)."""
        request = self._request
        return request["batch_size"], 1, len(range(request["q_length"])[self._rows]), request["kv_length"]

    @property
    def local_size(self) -> int | None:
        """The window or chunk size of a layer that does not see its whole document; otherwise None. As in plans, a row
        of a window sees keys that are less than so many rows away.
        """
        size: int | None = self._request.get("local_size")
        far_end = self.is_full and (torch.compiler.is_compiling() or self._asked_mask().has_far_end)
        return None if size is None else size + far_end


def _refuse_mask(what: str) -> NoReturn:
    raise InvalidArgumentError(
        f'attn_implementation="{NAME}": the model works on the attention mask itself ({what}), and so bypasses '
        "transformers' AttentionInterface or goes beyond it: its attention cannot be replaced; choose another "
        "attn_implementation"
    )


def distca_mask(**request: Any) -> DeferredMask | torch.Tensor | None:
    """The entry for AttentionMaskInterface: defers a request for a mask if a plan may still be used."""
    if isinstance(request.get("attention_mask"), DeferredMask):  # made before the model's forward, as generate() does
        return request["attention_mask"]
    whole = request["q_length"] == request["kv_length"] and isinstance(request.get("q_offset", 0), int)
    return DeferredMask(request) if whole else sdpa_mask(**request)
