"""Rows that see those after them, too, in models of transformers: prefixes and images.

A model says which rows do so twice: by its inputs, before a plan is made (`bidirectional_rows`), and by the mask that
it asks for, in its forward. A plan says so by its layout. `difference` compares the last two, for the rows of one rank.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedConfig

from distca.errors import InvalidArgumentError
from distca.planner.layout import PADDING, Layout
from distca.planner.pieces import whole_pieces

#: By model type, the input that marks such rows, and its values in them.
_MARKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "gemma3": ("token_type_ids", (1,)),
    "gemma4": ("mm_token_type_ids", (1, 2)),
    "gemma4_unified": ("mm_token_type_ids", (1, 2)),
    "paligemma": ("token_type_ids", (0,)),
    "hrm_text": ("token_type_ids", (1,)),
}

#: The text models that have such rows wherever they are asked for them.
_MAKE_BLOCKS = ("gemma3_text", "gemma4_text", "gemma4_unified_text", "hrm_text", "molmo2_text")

_MASKS = "transformers.masking_utils"
#: The functions of transformers that make masks of which a plan can take the place.
_KNOWN = (
    "add_offsets_to_mask_function",
    "and_masks",
    "blockwise_overlay",
    "causal_mask_function",
    "chunked_overlay",
    "or_masks",
    "packed_sequence_mask_function",
    "padding_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_overlay",
)
#: Those of which it makes full masks, without a window and with one.
_FULL = ("bidirectional_mask_function", "sliding_window_bidirectional_overlay")
_KNOWN_IN_FULL = (*_FULL, "add_offsets_to_mask_function", "and_masks", "padding_mask_function")
#: Gemma 3 makes a full mask by what it adds to the causal one (EmbeddingGemma).
_GEMMA3 = "transformers.models.gemma3.modeling_gemma3"
_ADDED_BY_GEMMA3 = ("Gemma3TextModel", "_bidirectional_window_overlay")


def has_marks(config: PreTrainedConfig) -> bool:
    """Whether an input of the model marks rows that see those after them."""
    return config.model_type in _MARKS


def bidirectional_rows(config: PreTrainedConfig, inputs: Mapping[str, Any], lengths: Sequence[int]) -> list[int]:
    """The bidirectional rows that a model's inputs ask for, as the numbers (document, begin, end) of each range.

    Args:
        config: the model's configuration.
        inputs: a rank's batch.
        lengths: the lengths of its documents, which are whole.

    Raises:
        InvalidArgumentError: the marks are no tensor of all rows.
    """
    name, values = _MARKS.get(config.model_type, ("", ()))
    marks, text = inputs.get(name), config.get_text_config()
    if in_sliding_layers_alone(config) and text.use_bidirectional_attention != "vision":
        marks = None
    if marks is None or not getattr(text, "prefix_lm", True):
        return []
    expected = f"[1, {sum(lengths)}], as of position_ids"
    if not isinstance(marks, torch.Tensor) or marks.shape != (1, sum(lengths)):
        found_shape = list(marks.shape) if isinstance(marks, torch.Tensor) else type(marks).__name__
        raise InvalidArgumentError(f"plan_inputs: {name} is {found_shape}; a tensor {expected}, is expected")
    marked = torch.isin(marks[0].cpu().long(), torch.tensor(values, device="cpu")).tolist()
    found, row = [], 0
    for document, length in enumerate(lengths):
        for begin, end in _runs(marked[row : row + length]):
            found += [document, begin, end]
        row += length
    return found


def in_sliding_layers_alone(config: PreTrainedConfig) -> bool:
    """Whether only layers with a window have such rows, as in Gemma 4."""
    return config.model_type in ("gemma4", "gemma4_unified")


def _runs(marked: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The ranges of what is marked."""
    row = 0
    for is_marked, run in itertools.groupby(marked):
        end = row + len(list(run))
        if is_marked:
            yield row, end
        row = end


class AskedMask:
    """The functions that a model's mask is made of.

    Attributes:
        is_known: whether all of them are known to mean what plans say.
        is_full: whether rows see those after them as they see those before them.
        has_far_end: whether a row of a full mask sees the row that lies as far away as the window says.
        blocks: for each row [1, T] the number of the rows that it sees besides, -1 for none; None if there are none.
        is_cut: whether a window hides what lies further back from these rows, too.
    """

    def __init__(self, mask_function: Callable[..., Any]) -> None:
        functions = list(_functions(mask_function))
        kinds = {_kind(function) for function in functions}
        by_gemma3 = not kinds.isdisjoint(_ADDED_BY_GEMMA3)
        self.is_full, self.has_far_end = by_gemma3 or not kinds.isdisjoint(_FULL), not by_gemma3
        known = (*_KNOWN, *_ADDED_BY_GEMMA3) if by_gemma3 else _KNOWN_IN_FULL if self.is_full else _KNOWN
        self.is_known = kinds.issubset(known)
        blocks = [_free(f)["block_sequence_ids"] for f in functions if _kind(f) == "blockwise_overlay"]
        self.blocks: torch.Tensor | None = blocks[0] if blocks else None
        self.is_known = self.is_known and len({id(one) for one in blocks}) <= 1
        self.is_cut = any(_kind(f) == "and_masks" and _cuts_blocks(f) for f in functions)


def _kind(function: Callable[..., Any]) -> str:
    """The function or class of transformers that made this one, or is this one; empty for all others."""
    name = function.__qualname__.split(".")[0]
    known = function.__module__ == _MASKS or (function.__module__ == _GEMMA3 and name in _ADDED_BY_GEMMA3)
    return name if known else ""


def _free(function: Callable[..., Any]) -> dict[str, Any]:
    assert isinstance(function, FunctionType)
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _parts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions that a function calls, as far as it holds them."""
    if not isinstance(function, FunctionType):
        return []
    held = itertools.chain.from_iterable(
        value if isinstance(value, tuple | list) else (value,) for value in _free(function).values()
    )
    return [one for one in held if callable(one) and not isinstance(one, torch.Tensor)]


def _functions(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    yield function
    for part in _parts(function):
        yield from _functions(part)


def _cuts_blocks(intersection: Callable[..., Any]) -> bool:
    """Whether it is the intersection of a window and something that has blocks."""
    parts = _parts(intersection)
    return any(_kind(part) == "sliding_window_overlay" for part in parts) and any(
        _kind(inner) == "blockwise_overlay" for part in parts for inner in _functions(part)
    )


def makes_blocks(module: torch.nn.Module) -> bool:
    """Whether a layer is of a model that says itself which rows see those after them."""
    return getattr(getattr(module, "config", None), "model_type", None) in _MAKE_BLOCKS


def difference(asked: AskedMask, layout: Layout, rank: int, window: int | None, may_ask_none: bool) -> str | None:
    """In what a mask differs from what a layout says of bidirectional rows, on one rank; None if it does not.

    Args:
        asked: what the model asks for.
        layout: that of the plan.
        rank: the rank.
        window: the layer's window.
        may_ask_none: whether the layout alone says it, for models that know nothing of such rows.
    """
    ranges = layout.bidirectional
    if asked.blocks is None and (may_ask_none or not ranges):
        return None
    planned, wanted = _planned_pieces(ranges, layout, rank), _asked_pieces(asked.blocks, layout, rank)
    numbers = [] if asked.blocks is None else asked.blocks[0].tolist()
    runs = Counter(number for number, _ in itertools.groupby(numbers))
    ranges_of: defaultdict[tuple[int, int], set[int | None]] = defaultdict(set)
    for piece, number in wanted.items():
        ranges_of[piece[0], number].add(planned.get(piece))
    for (document, begin, end), number in wanted.items():
        # Rows of one number that follow one another on the rank alone may be of several ranges; others must be of one.
        lie_apart = len(ranges_of[document, number]) > 1 and runs[number] > 1
        if (document, begin, end) not in planned or lie_apart:
            return (
                f"the model asks that rows [{begin}, {end}) of document {document} see those after them, and the "
                f"plan's layout says {ranges.get(document, 'nothing of this document')}: give it to the "
                f"layout, layout.with_bidirectional({{{document}: [({begin}, {end}), ...]}}), as hf.plan_inputs does. "
                "Rows that see each other over others between them are not supported yet"
            )
    for document, begin, end in planned:
        if (document, begin, end) not in wanted:
            return (
                f"the plan's layout says that rows [{begin}, {end}) of document {document} see those after them, and "
                "this layer asks for nothing of this kind: pass the model what marks these rows, such as "
                "token_type_ids, or make a layout without them"
            )
    touching = next(((d, a[1]) for d, of in ranges.items() for a, b in itertools.pairwise(of) if a[1] == b[0]), None)
    if asked.blocks is not None and touching is not None:
        return (
            f"two ranges of the plan's layout touch, at row {touching[1]} of document {touching[0]}: of rows that "
            "follow one another the model makes one range"
        )
    longest = max((end - begin for of_document in ranges.values() for begin, end in of_document), default=0)
    if wanted and window is not None and longest > window and not asked.is_cut:
        return (
            f"rows that see each other further back than the layer's window of {window}: the plan's window hides these "
            f"keys; at most {window} such rows in one range are supported"
        )
    return None


Piece = tuple[int, int, int]


def _planned_pieces(ranges: dict[int, list[tuple[int, int]]], layout: Layout, rank: int) -> dict[Piece, int]:
    """The parts of bidirectional ranges that lie on a rank, one after another there, and the number of each range."""
    found: dict[Piece, int] = {}
    for document, first, last in whole_pieces(layout, rank):
        for number, (begin, end) in enumerate(ranges.get(document, ())):
            piece = (document, max(begin, first), min(end, last))
            if piece[1] < piece[2]:
                found[piece] = number
    return found


def _asked_pieces(blocks: torch.Tensor | None, layout: Layout, rank: int) -> dict[Piece, int]:
    """The same of what a model asks for: its rows of one number, one after another on the rank and in a document."""
    found: dict[Piece, int] = {}
    numbers = [] if blocks is None else blocks[0].tolist()
    row = 0
    for document, first, last in whole_pieces(layout, rank):
        of_segment = numbers[row : row + last - first]
        row += last - first
        if document == PADDING:
            continue
        begin = first
        for number, run in itertools.groupby(of_segment):
            end = begin + len(list(run))
            if number >= 0:
                found[document, begin, end] = number
            begin = end
    return found
