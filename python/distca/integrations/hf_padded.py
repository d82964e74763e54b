"""Padded batches: which of their rows are computed, as one packed row, and where the results of these go.

`batch_of` finds a rank's documents in a batch [B, L], and their common beginnings; `layout_of` makes the layout of what
all ranks tell of theirs. hf_unpad.py lets models compute these rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from distca.integrations.hf_bidirectional import bidirectional_rows, has_marks
from distca.integrations.hf_forward import parameters_of, wants_routers
from distca.integrations.hf_limits import examine
from distca.integrations.hf_models import refuse
from distca.planner.layout import PADDING, Layout

#: Common first rows of fewer rows are computed for each document. A task of fewer rows is slow (`distca bench shards`).
_FEWEST_SHARED = 16
#: What transformers calls a cache, before version 5.24 and since then.
CACHES = ("past_key_values", "cache")
#: What a model is told of padded rows, and not of packed ones.
_OF_PADDED_ROWS = ("attention_mask", "cache_position", *CACHES)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Which rows of a padded batch are computed, and where their results go.

    Attributes:
        shape: the batch's (B, L). A place is the number of a row among all B * L.
        kept: int64 [T], the place of each packed row.
        places: int64 [P], the places that get a result. The others are padding.
        rows: int64 [P], the packed row of each of these places.
        told: what this rank tells the others: the number of documents; for each of them the document with the row
            before its own first one, or -1, then the ends of its own rows; and its bidirectional rows.
    """

    shape: tuple[int, int]
    kept: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor
    told: list[int]

    def padded(self, value: Any) -> Any:
        """The results of packed rows as those of the batch, with zeros in its padding."""
        if isinstance(value, ModelOutput):
            for name, of in value.items():
                if name != "pooler_output":  # a row for each of the batch, whatever their numbers
                    value[name] = self.padded(of)
        elif isinstance(value, tuple | list):
            return type(value)(self.padded(of) for of in value)
        elif isinstance(value, torch.Tensor) and value.shape[:2] == (1, len(self.kept)):
            return self._padded(value[0]).unflatten(0, self.shape)
        elif isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[1:3] == (1, len(self.kept)):
            return torch.stack([self.padded(of) for of in value])  # Gemma 3n's streams
        elif isinstance(value, torch.Tensor) and value.shape[:1] == self.kept.shape:  # as routers' logits have it
            return self._padded(value)
        return value

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        results = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
        return results.index_copy(0, self.places.to(rows.device), rows[self.rows.to(rows.device)])


def _packed(value: Any, shape: tuple[int, int], kept: torch.Tensor) -> Any:
    """The rows at these places, [1, T, ...], of a tensor [B, L, ...]; of positions of several axes, [n, 1, T]. Anything
    else is left as it is.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape[:2] == shape:
        return value.flatten(0, 1)[kept.to(value.device)][None]
    if value.dim() == 3 and value.shape[1:] == shape:
        return value.flatten(1)[:, None, kept.to(value.device)]
    return value


def packed_arguments(
    model: PreTrainedModel, given: Mapping[str, Any], batch: Batch, positions: torch.Tensor
) -> dict[str, Any]:
    """The arguments of a model for the rows that are no padding, which have these positions."""
    packed = {
        name: _packed(value, batch.shape, batch.kept) for name, value in given.items() if name not in _OF_PADDED_ROWS
    }
    names = parameters_of(type(model).forward)[0]
    if "use_cache" in names:
        packed["use_cache"] = False
    if "position_ids" in names and not _has_axes(given):
        packed["position_ids"] = (positions + examine(model).first_position)[None].to(batch.kept.device)
    return packed


def _has_axes(given: Mapping[str, Any]) -> bool:
    """Whether positions have several axes, as those of images have."""
    positions = given.get("position_ids")
    return isinstance(positions, torch.Tensor) and positions.dim() == 3


def batch_of(model: PreTrainedModel, given: Mapping[str, Any], share_prompts: bool) -> Batch:
    """The rows of a batch. Raises InvalidArgumentError if it is not of the form that `unpad` takes."""
    tokens, shape = _tokens_of(given)
    places = _places(given, shape)
    bidirectional: list[int] = []
    if has_marks(model.config):
        kept = torch.cat([_NONE, *places])
        of_documents = {name: _packed(value, shape, kept) for name, value in given.items()}
        bidirectional = bidirectional_rows(model.config, of_documents, [len(of) for of in places])
    order, own = [*range(len(places))], [(-1, 0)] * len(places)
    if share_prompts:
        refuse(bool(bidirectional), "share_prompts is for causal models: rows of this batch see those after them")
        refuse(
            wants_routers(model, given),
            "the routers' loss counts shared rows once, and so is another one: leave out share_prompts, or set "
            "output_router_logits=False in the model's config (in TRL: router_aux_loss_coef=0.0)",
        )
        order, own = _shared(_words(given, shape), places)
    kept_of_documents: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    told, num_rows = [len(places)], 0
    for number, (parent, begin) in zip(order, own, strict=True):
        end = num_rows + len(places[number]) - begin
        above = rows[-1][:begin] if begin else _NONE
        rows.append(torch.cat([above, _range(num_rows, end)]))
        kept_of_documents.append(places[number][begin:])
        told += [parent, begin, len(places[number])]
        num_rows = end
    if not places:  # transformers cannot run a tensor of no rows
        kept_of_documents, rows, places, order = [_range(0, 1)], [_NONE], [_NONE], [0]
    on = tokens.device
    return Batch(
        shape,
        torch.cat(kept_of_documents).to(on),
        torch.cat([places[number] for number in order]).to(on),
        torch.cat(rows).to(on),
        [*told, *bidirectional],
    )


def _range(begin: int, end: int) -> torch.Tensor:
    """Numbers of rows, on the CPU whatever PyTorch's default device is."""
    return torch.arange(begin, end, device="cpu")


#: No rows.
_NONE = _range(0, 0)


def _tokens_of(given: Mapping[str, Any]) -> tuple[torch.Tensor, tuple[int, int]]:
    """The tensor of a batch's tokens or their embeddings, and (B, L)."""
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    refuse(
        not isinstance(tokens, torch.Tensor) or tokens.dim() < 2 or 0 in tokens.shape[:2],
        "a model that went through hf.unpad takes input_ids [B, L], or inputs_embeds [B, L, width], of at least one row"
        + (f", and not {[*tokens.shape]}" if isinstance(tokens, torch.Tensor) else ""),
    )
    assert isinstance(tokens, torch.Tensor)
    shape = tokens.shape[0], tokens.shape[1]
    of_rows = (
        name
        for name, v in given.items()
        if isinstance(v, torch.Tensor) and v.shape == shape[:1] and name not in _OF_PADDED_ROWS
    )
    other = next(of_rows, None) if shape[0] > 1 else None
    refuse(
        other is not None, f"{other} has a number for each row of the batch, whose documents are packed into one row"
    )
    return tokens, shape


def _places(given: Mapping[str, Any], shape: tuple[int, int]) -> list[torch.Tensor]:
    """The places of each document's rows."""
    position_ids = given.get("position_ids")
    if _has_axes(given):  # where there are four, the first counts rows of text and the others are of images
        position_ids = position_ids[0] if len(position_ids) == 4 else None  # type: ignore[index, arg-type]
    positions = _positions(position_ids, shape)
    return [
        _range(begin, end) + row * shape[1]
        for row, (first, last) in enumerate(_ends(given.get("attention_mask"), shape))
        for begin, end in _documents(positions, row, first, last)
    ]


def _ends(attention_mask: Any, shape: tuple[int, int]) -> list[tuple[int, int]]:
    """The first row and the end of what is no padding, in each row of the batch."""
    if attention_mask is None:
        return [(0, shape[1])] * shape[0]
    refuse(
        not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != shape,
        f"a model that went through hf.unpad takes attention_mask {[*shape]}, as of its rows, and not "
        + (f"{[*attention_mask.shape]}" if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__),
    )
    kept, found = attention_mask.bool().cpu(), []
    for row in range(shape[0]):
        places = kept[row].nonzero().flatten()
        first, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        refuse(
            end - first != len(places),
            f"attention_mask hides rows of row {row} of the batch between others: padding stands before or after a "
            "document, not inside of it",
        )
        found.append((first, end))
    return found


def _positions(position_ids: Any, shape: tuple[int, int]) -> torch.Tensor | None:
    """The positions that a batch has, int64 [B, L] on the CPU."""
    if position_ids is None:
        return None
    is_tensor = isinstance(position_ids, torch.Tensor)
    refuse(
        not is_tensor or position_ids.shape not in (shape, (1, shape[1])),
        f"position_ids are {[*position_ids.shape] if is_tensor else type(position_ids).__name__}, must be {[*shape]}",
    )
    positions: torch.Tensor = position_ids.cpu().long().expand(shape)
    return positions


def _documents(positions_of_rows: torch.Tensor | None, row: int, first: int, end: int) -> list[tuple[int, int]]:
    """The ends of the documents in rows [first, end) of a row of the batch."""
    if positions_of_rows is None or first == end:
        return [(first, end)] if first < end else []
    positions = positions_of_rows[row, first:end]
    if torch.equal(positions, _range(first, end)):  # as transformers counts where it gets none
        return [(first, end)]
    starts = [*(positions == 0).nonzero().flatten().tolist(), end - first]
    counted = torch.cat([_range(0, ends - begin) for begin, ends in itertools.pairwise([0, *starts])])
    refuse(
        starts[0] != 0 or not torch.equal(counted, positions),
        f"position_ids of row {row} of the batch do not count each document from 0, beginning at its first row that "
        "is no padding. Leave them out where a row has one document",
    )
    return [(first + begin, first + ends) for begin, ends in itertools.pairwise(starts)]


def _words(given: Mapping[str, Any], shape: tuple[int, int]) -> torch.Tensor:
    """What each row of a batch is made of, [B * L, n] integers, for finding rows that are alike."""
    known = (*_OF_PADDED_ROWS, *(() if _has_axes(given) else ("position_ids",)))
    tensors = {name: v for name, v in given.items() if isinstance(v, torch.Tensor) and v.dim() and name not in known}
    other = next((name for name, v in tensors.items() if v.shape != shape or v.is_floating_point()), None)
    refuse(
        other is not None,
        f"share_prompts finds rows that are alike by their tokens, and this model gets {other}, too: leave it out",
    )
    return torch.stack([of_rows.flatten().cpu() for of_rows in tensors.values()], 1)


def _shared(words: torch.Tensor, places: Sequence[torch.Tensor]) -> tuple[list[int], list[tuple[int, int]]]:
    """An order of documents in which each has its longest common beginning with the one before; and, in this order, the
    number of the document with the row before a document's own first one, or -1, and that row's number. Between two
    documents that begin alike only such ones stand that do so, too. So the one before has the most common rows; where
    these are not its own, that one has them whose branch it is.
    """
    texts = [words[of] for of in places]
    lists = [text.flatten().tolist() for text in texts]
    order = sorted(range(len(texts)), key=lists.__getitem__)
    own: list[tuple[int, int]] = []
    for number, document in enumerate(order):
        shared = _common(texts[order[number - 1]], texts[document]) if number else 0
        if shared < _FEWEST_SHARED:
            own.append((-1, 0))
            continue
        above = number - 1
        while own[above][1] >= shared:
            above = own[above][0]
        own.append((above, shared))
    return order, own


def _common(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many first rows of two documents are alike. The second keeps a row of its own."""
    most = min(len(a), len(b) - 1)
    differ = (a[:most] != b[:most]).any(1).nonzero()
    return int(differ[0]) if len(differ) else most


def layout_of(told: Sequence[Sequence[int]]) -> Layout:
    """The layout of what the ranks have told (`Batch.told`)."""
    segments: list[list[tuple[int, int, int]]] = []
    branches: dict[int, int] = {}
    bidirectional: dict[int, list[tuple[int, int]]] = {}
    first = 0
    for words in told:
        end = 1 + 3 * words[0]
        documents = [(words[i], words[i + 1], words[i + 2]) for i in range(1, end, 3)]
        segments.append([(first + n, begin, length) for n, (_, begin, length) in enumerate(documents)])
        branches |= {first + n: first + parent for n, (parent, _, _) in enumerate(documents) if parent >= 0}
        for i in range(end, len(words), 3):
            bidirectional.setdefault(first + words[i], []).append((words[i + 1], words[i + 2]))
        first += len(documents)
    layout = Layout([of_rank or [(PADDING, 0, 1)] for of_rank in segments], branches=branches)
    return layout.with_bidirectional(bidirectional) if bidirectional else layout
