"""The configuration of a training run. A wrong value fails here, before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from distca.errors import InvalidArgumentError
from distca.heads import Heads

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VOCABULARY = 256  # byte tokens

STANDARD_LIBRARY_SCALE = 1 / 16
"""Keeps the shape of the length distribution of whole source files, and so the imbalance, at some 4096 tokens."""


class ConfigError(InvalidArgumentError):
    """An option has a value that is not allowed."""


def _about(help: str, choices: tuple[str, ...] | None = None, *, fixed: bool = False) -> dict[str, Any]:
    """`fixed`: a run that is resumed must keep it."""
    return {"help": help, "choices": choices, "fixed": fixed}


@dataclass(frozen=True)
class TrainConfig:
    """Options of `distca train`; each field is the command line option of the same name."""

    ranks: int = field(default=2, metadata=_about("number of ranks (processes); under torchrun its world size"))
    steps: int = field(default=100, metadata=_about("training steps"))
    tokens_per_rank: int = field(default=4096, metadata=_about("tokens each rank holds in a step"))
    data: Path | None = field(
        default=None,
        metadata=_about("folder of UTF-8 text files, each a document (default: the Python standard library's sources)"),
    )
    doc_scale: float | None = field(
        default=None,
        metadata=_about(
            "fraction of each document to keep, from its start (default: 1/16 for the standard library, else 1)"
        ),
    )
    hidden: int = field(default=128, metadata=_about("hidden size of the model", fixed=True))
    layers: int = field(default=2, metadata=_about("number of layers", fixed=True))
    heads: int = field(default=4, metadata=_about("number of query heads", fixed=True))
    kv_heads: int = field(default=2, metadata=_about("number of key/value heads", fixed=True))
    dtype: str = field(default="float32", metadata=_about("dtype of the model", choices=tuple(DTYPES), fixed=True))
    lr: float = field(default=3e-3, metadata=_about("peak learning rate (AdamW)", fixed=True))
    seed: int = field(default=0, metadata=_about("seed of weights and of the order of documents", fixed=True))
    balance: str = field(
        default="on",
        metadata=_about("off: every row's attention is computed on the rank that holds it", choices=("on", "off")),
    )
    tolerance: float = field(
        default=0.05, metadata=_about("allowed excess of the largest attention load over the mean")
    )
    compare: bool = field(
        default=False, metadata=_about("take each step with and without balance on the same batch, and compare times")
    )
    fsdp: bool = field(
        default=False, metadata=_about("shard weights, gradients and optimizer over the ranks, layer by layer (FSDP2)")
    )
    compile: bool = field(default=False, metadata=_about("compile each layer with torch.compile"))
    checkpoint_every: int = field(
        default=0,
        metadata=_about("steps between checkpoints; 0: one at the end, or where the run is interrupted"),
    )
    keep_checkpoints: int = field(default=2, metadata=_about("how many of the last checkpoints to keep"))
    timeout: float = field(default=600.0, metadata=_about("seconds a rank waits for another before it gives up"))
    name: str = field(default="train", metadata=_about("name of the run; a number is appended if it exists"))
    runs_dir: Path = field(default=Path("runs"), metadata=_about("folder of the runs"))

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:  # so written, NaN fails too
                _fail(self, name, f"at least {least}")
        for name in ("lr", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                _fail(self, name, "above 0 and finite")
        if not 0 <= self.tolerance <= 1:
            _fail(self, "tolerance", "0 to 1")
        for option in fields(self):
            choices = option.metadata["choices"]
            if choices is not None and getattr(self, option.name) not in choices:
                _fail(self, option.name, f"one of {', '.join(choices)}")
        if self.doc_scale is not None and not 0 < self.doc_scale <= 1:
            _fail(self, "doc_scale", "above 0 and at most 1")
        if self.heads % self.kv_heads:
            _fail(self, "kv_heads", f"a divisor of --heads ({self.heads})")
        if self.hidden % self.heads or self.head_dim % 8 or self.head_dim > 256:
            _fail(self, "hidden", f"--heads ({self.heads}) times a head size that is a multiple of 8 and at most 256")
        if self.compare and self.balance == "off":
            _fail(self, "balance", "left out with --compare, which takes every step with both")
        if not self.name or self.name in (".", "..") or "/" in self.name or "\0" in self.name:
            _fail(self, "name", "the name of a folder, without '/'")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def attention_heads(self) -> Heads:
        return Heads(q=self.heads, kv=self.kv_heads, dim=self.head_dim, dtype=self.torch_dtype)

    @property
    def kept_fraction(self) -> float:
        """The fraction of each document that is kept."""
        if self.doc_scale is not None:
            return self.doc_scale
        return STANDARD_LIBRARY_SCALE if self.data is None else 1.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in a step; they alone say which documents a step holds."""
        return self.ranks * self.tokens_per_rank

    def as_json(self) -> dict[str, Any]:
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @staticmethod
    def from_json(values: dict[str, Any]) -> TrainConfig:
        """The inverse of `as_json`; options that a later version has added take their defaults."""
        read: dict[str, Any] = {}
        for name, value in values.items():
            if name in OPTION_TYPES:
                read[name] = Path(value) if OPTION_TYPES[name] is Path and value is not None else value
        return TrainConfig(**read)


_LEAST: dict[str, float] = {
    "ranks": 1, "steps": 1, "tokens_per_rank": 1, "hidden": 1, "layers": 1, "heads": 1, "kv_heads": 1,
    "seed": 0, "checkpoint_every": 0, "keep_checkpoints": 1,
}  # fmt: skip

OPTION_TYPES: dict[str, Callable[[str], Any]] = {
    "ranks": int, "steps": int, "tokens_per_rank": int, "data": Path, "doc_scale": float, "hidden": int, "layers": int,
    "heads": int, "kv_heads": int, "dtype": str, "lr": float, "seed": int, "balance": str, "tolerance": float,
    "compare": bool, "fsdp": bool, "compile": bool,
    "checkpoint_every": int, "keep_checkpoints": int, "timeout": float, "name": str, "runs_dir": Path,
}  # fmt: skip
"""How the command line reads each field."""


def option_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _fail(config: TrainConfig, name: str, allowed: str) -> None:
    raise ConfigError(f"{option_name(name)} is {getattr(config, name)}, must be {allowed}")
