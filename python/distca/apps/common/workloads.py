"""Batches of documents for planners, drawn from a list of lengths or read from a workload file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import distca
from distca.errors import InvalidArgumentError

_PRETRAIN = Path("benchmarks/workloads/doc_lengths_pretrain.json")


def draw_documents(lengths: Sequence[int], ranks: int, tokens_per_rank: int, seed: int = 0) -> list[list[int]]:
    """Draws the lengths of each rank's documents with replacement. They are even, and cut where the rank is full.

    Args:
        lengths: the lengths to draw from, in tokens.
        ranks: number of ranks.
        tokens_per_rank: tokens of each rank; even.
        seed: seed of the draws. The same seed gives the same documents.

    Returns:
        For each rank the lengths of its documents, in tokens.

    Raises:
        InvalidArgumentError: there are no lengths, or a number is not allowed.
    """
    if not lengths:
        raise InvalidArgumentError("workload: there are no lengths to draw from")
    for name, value, power in (("ranks", ranks, 20), ("tokens_per_rank", tokens_per_rank, 31)):
        if not 1 <= value <= 2**power:
            raise InvalidArgumentError(f"workload: {name} = {value}; 1 to 2^{power} are allowed")
    if tokens_per_rank % 2:
        raise InvalidArgumentError(f"workload: tokens_per_rank = {tokens_per_rank}; an even number is allowed")
    generator = random.Random(seed)
    documents: list[list[int]] = []
    for _ in range(ranks):
        of_rank: list[int] = []
        left = tokens_per_rank
        while left > 0:
            drawn = min(generator.choice(lengths), left)
            of_rank.append(max(2, drawn - drawn % 2))
            left -= of_rank[-1]
        documents.append(of_rank)
    return documents


def pretrain_lengths() -> Path:
    """The file of a pretraining corpus's lengths, in the working directory or the source tree of an in-place install.

    Raises:
        InvalidArgumentError: the file is in neither.
    """
    for root in (Path.cwd(), Path(distca.__file__).resolve().parents[2]):
        if (root / _PRETRAIN).exists():
            return root / _PRETRAIN
    raise InvalidArgumentError(f"workload: there is no {_PRETRAIN} here; run the command in distca's source tree")


def read_lengths(path: Path) -> list[int]:
    """Reads a JSON list of document lengths in tokens."""
    lengths = _read_json(path)
    if not isinstance(lengths, list):
        raise InvalidArgumentError(f"{path}: a list of lengths is expected, not {type(lengths).__name__}")
    return _lengths(path, lengths)


def read_workload(path: Path) -> list[list[int]]:
    """Reads a JSON object whose ``documents`` has the lengths of each rank's documents, in tokens."""
    content = _read_json(path)
    documents = content.get("documents") if isinstance(content, dict) else None
    if not isinstance(documents, list) or not all(isinstance(of_rank, list) for of_rank in documents):
        raise InvalidArgumentError(f'{path}: an object with "documents", a list of lengths for each rank, is expected')
    return [_lengths(path, of_rank, f"rank {rank}, ") for rank, of_rank in enumerate(documents)]


def _lengths(path: Path, values: list[Any], where: str = "") -> list[int]:
    for index, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31:
            raise InvalidArgumentError(f"{path}: {where}document {index} has length {value!r}; 1 to 2^31 are allowed")
    return values


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: is not JSON: {error}") from error
