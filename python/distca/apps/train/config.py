"""The configuration of a training run. A wrong value fails here, before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from distca.apps.common.options import ConfigError
from distca.apps.common.sources import STANDARD_LIBRARY_SCALE
from distca.heads import LARGEST_DIM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HOMES = ("packed", "head-tail", "whole")
"""Where the documents of a micro-batch may lie."""

TINY = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2}
"""The shape of the model that is trained without `--model`."""

SCHEDULES = (
    "cosine_warmup_with_min_lr", "cosine_with_min_lr", "cosine", "cosine_with_restarts", "linear", "polynomial",
    "inverse_sqrt", "constant_with_warmup", "constant",
)  # fmt: skip
"""The schedules of transformers that need nothing but their numbers of steps."""

WARMUP_STEPS = 5
"""Steps of the warm-up without `--warmup-steps`."""


def _about(
    help: str,
    choices: tuple[str, ...] | None = None,
    *,
    fixed: bool = False,
    bare: str | None = None,
    also: str | None = None,
) -> dict[str, Any]:
    """Metadata of a field.

    `fixed`: a resumed run must keep it. `bare`: its value if it is given without one. `also`: another name of the
    option.
    """
    return {"help": help, "choices": choices, "fixed": fixed, "bare": bare, "also": also}


@dataclass(frozen=True)
class TrainConfig:
    """Options of `distca train`. Each field is the command line option of the same name."""

    ranks: int = field(default=2, metadata=_about("number of ranks (processes); under torchrun it is the world size"))
    steps: int = field(default=100, metadata=_about("optimizer steps"))
    tokens_per_rank: int = field(
        default=4096,
        metadata=_about(
            "tokens that each data rank holds in a micro-batch; a step has one micro-batch unless --micro-batches says "
            "more"
        ),
    )
    accumulate: int | None = field(
        default=None,
        metadata=_about(
            "micro-batches in each step; their gradients are added up (default: 1; with --pipeline, twice the stages)",
            fixed=True,
            also="--micro-batches",
        ),
    )
    pipeline: int = field(
        default=1,
        metadata=_about(
            "stages of pipeline parallelism: each has a part of the layers, and all compute attention together"
        ),
    )
    chunks: int = field(
        default=1, metadata=_about("chunks of layers of each stage, which micro-batches pass one after the other")
    )
    layers_per_stage: str | None = field(
        default=None,
        metadata=_about(
            "layers of each stage's chunks, such as 3,2 (default: dealt by the cost of the layers and the head)"
        ),
    )
    tensor: int = field(
        default=1,
        metadata=_about("processes that share each layer (tensor parallelism, by the plan that transformers has)"),
    )
    data: Path | None = field(
        default=None,
        metadata=_about(
            "what to train on: a folder of UTF-8 text files (one document each), a .jsonl file of objects with a "
            "'text' or a folder with such files, or a .parquet file, a folder with them or a saved dataset with a "
            "column text or input_ids (default: the sources of Python's standard library)"
        ),
    )
    doc_scale: float | None = field(
        default=None,
        metadata=_about(
            "fraction of each document to keep, from its start (default: 1/16 for the standard library, otherwise 1)"
        ),
    )
    tokenizer: Path | None = field(
        default=None,
        metadata=_about(
            "folder or tokenizer.json of a tokenizer of transformers (default: none, each byte is a token)", fixed=True
        ),
    )
    model: str | None = field(
        default=None,
        metadata=_about(
            "llama-8b, a config.json or its folder (random weights), or the folder of a checkpoint of transformers; "
            "nothing is downloaded (default: a tiny Llama)",
            fixed=True,
        ),
    )
    hidden: int | None = field(
        default=None, metadata=_about(f"hidden size of the tiny model (default: {TINY['hidden']})", fixed=True)
    )
    layers: int | None = field(
        default=None,
        metadata=_about(
            "number of layers; with --model, keep only the first so many (default: 2; with --model, all)", fixed=True
        ),
    )
    heads: int | None = field(
        default=None, metadata=_about(f"number of query heads of the tiny model (default: {TINY['heads']})", fixed=True)
    )
    kv_heads: int | None = field(
        default=None,
        metadata=_about(f"number of key/value heads of the tiny model (default: {TINY['kv_heads']})", fixed=True),
    )
    dtype: str = field(
        default="float32",
        metadata=_about("dtype of weights, activations, gradients and optimizer", choices=tuple(DTYPES), fixed=True),
    )
    master_weights: bool = field(
        default=False,
        metadata=_about(
            "with --dtype bfloat16: keep weights and optimizer in float32, compute in bfloat16", fixed=True
        ),
    )
    lr: float = field(default=3e-3, metadata=_about("peak learning rate of AdamW", fixed=True))
    schedule: str = field(
        default=SCHEDULES[0],
        metadata=_about(
            "schedule of the learning rate, by its name in transformers; those with min_lr end at a tenth of --lr",
            choices=SCHEDULES,
            fixed=True,
        ),
    )
    warmup_steps: int | None = field(
        default=None,
        metadata=_about(f"steps in which the learning rate rises to --lr (default: {WARMUP_STEPS})", fixed=True),
    )
    weight_decay: float = field(
        default=0.0, metadata=_about("weight decay of AdamW; norms and biases have none", fixed=True)
    )
    clip_norm: float | None = field(
        default=None,
        metadata=_about(
            "largest norm of all gradients together; larger gradients are scaled down (default: no clipping)",
            fixed=True,
        ),
    )
    seed: int = field(default=0, metadata=_about("seed of weights and of the order of documents", fixed=True))
    balance: str = field(
        default="on",
        metadata=_about(
            "on: attention is balanced over the ranks; off: each rank computes the rows that it holds",
            choices=("on", "off"),
        ),
    )
    tolerance: float = field(
        default=0.05, metadata=_about("how far the largest attention load may be above the mean, as a fraction")
    )
    homes: str = field(
        default=HOMES[0],
        metadata=_about(
            "where documents lie: packed: one after another over the data ranks; head-tail: long ones on many data "
            "ranks, each of which holds a part from either end; whole: each on one data rank, and the rest of one that "
            "does not fit is a document of its own, so that no rows travel to recurrent layers",
            choices=HOMES,
        ),
    )
    context: int | None = field(
        default=None,
        metadata=_about(
            "with --homes head-tail: number of neighbouring data ranks that share a document of more than half of "
            "--tokens-per-rank (default: chosen for each document)"
        ),
    )
    retain_bytes: int = field(
        default=0,
        metadata=_about(
            "bytes of keys and values of other ranks that a rank may keep in each layer from forward to backward; "
            "kept ones are not sent again"
        ),
    )
    attention_reduce_dtype: str = field(
        default="float32",
        metadata=_about(
            "dtype in which contributions of several ranks to the gradients of a key and value travel: float32, or "
            "that of --dtype, which is half the bytes",
            choices=tuple(DTYPES),
        ),
    )
    compare: bool = field(
        default=False, metadata=_about("run each batch with and without balance, and compare the times")
    )
    fsdp: bool = field(
        default=False, metadata=_about("shard weights, gradients and optimizer over the ranks, layer by layer (FSDP2)")
    )
    compile: bool = field(default=False, metadata=_about("compile each layer with torch.compile"))
    checkpoint_activations: bool = field(
        default=False,
        metadata=_about(
            "activation checkpointing: keep only each layer's input and attention's output for backward, and compute "
            "the rest again"
        ),
    )
    ping_pong: bool = field(
        default=False,
        metadata=_about("run two halves of each batch at once: one computes while the other's rows travel"),
    )
    eval_data: Path | None = field(default=None, metadata=_about("what to evaluate on, in one of the forms of --data"))
    eval_fraction: float | None = field(
        default=None,
        metadata=_about(
            "fraction of the documents of --data to evaluate on and not to train on, chosen by --seed", fixed=True
        ),
    )
    eval_every: int = field(default=0, metadata=_about("steps between evaluations; 0 means one evaluation, at the end"))
    eval_steps: int = field(default=8, metadata=_about("evaluate on at most the batches of this many steps"))
    checkpoint_every: int = field(
        default=0,
        metadata=_about(
            "steps between checkpoints; 0 means none in between. One is also written at the end and at an interrupt"
        ),
    )
    keep_checkpoints: int = field(default=2, metadata=_about("how many of the last checkpoints to keep"))
    export: Path | None = field(
        default=None,
        metadata=_about(
            "write the model at the end of the run to this new or empty folder, for from_pretrained of transformers; "
            "`distca export` does so for an earlier run"
        ),
    )
    trace: str | None = field(
        default=None,
        metadata=_about(
            "write what all ranks did in the first 10 steps to trace.json in the run's folder, for Perfetto and "
            "`distca report`; with FILE, also write it there",
            bare="",
        ),
    )
    nsys: bool = field(
        default=False,
        metadata=_about(
            "make NVTX ranges, and a capture range (cudaProfilerStart, Stop) around 10 steps, for Nsight Systems; "
            "ENABLE_NSYS=1 in the environment does the same"
        ),
    )
    log_memory: bool = field(
        default=False,
        metadata=_about(
            "write the memory of every rank at points of each step to memory-rank<N>.jsonl in the run's folder; "
            "EXPERIMENT_LOG_MEMORY_USAGE=1 in the environment does the same"
        ),
    )
    track: str | None = field(
        default=None,
        metadata=_about(
            "also send the figures of every step to Weights & Biases (needs the package wandb)", choices=("wandb",)
        ),
    )
    timeout: float = field(default=600.0, metadata=_about("seconds that a rank waits for another before it gives up"))
    name: str = field(
        default="train", metadata=_about("name of the run's folder; a number is appended if the folder exists")
    )
    runs_dir: Path = field(default=Path("runs"), metadata=_about("folder that holds the folders of runs"))

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # written so that NaN fails too
                _fail(self, name, f"at least {least}")
        for name in ("lr", "timeout", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                _fail(self, name, "above 0 and finite")
        if self.seed >= 2**64:
            _fail(self, "seed", "below 2^64")
        if not 0 <= self.tolerance <= 1:
            _fail(self, "tolerance", "0 to 1")
        for option in fields(self):
            choices, value = option.metadata["choices"], getattr(self, option.name)
            if choices is not None and value != option.default and value not in choices:
                _fail(self, option.name, f"one of {', '.join(choices)}")
        if self.doc_scale is not None and not 0 < self.doc_scale <= 1:
            _fail(self, "doc_scale", "above 0 and at most 1")
        if self.model is None:
            self._check_tiny()
        else:
            for name in TINY.keys() - {"layers"}:
                if getattr(self, name) is not None:
                    _fail(self, name, "left out with --model, which has a shape of its own")
        if self.eval_fraction is not None:
            if not 0 < self.eval_fraction < 1:
                _fail(self, "eval_fraction", "above 0 and below 1")
            if self.eval_data is not None:
                _fail(self, "eval_fraction", "left out with --eval-data")
        elif self.eval_data is None and self.eval_every:
            _fail(self, "eval_every", "left out without --eval-data or --eval-fraction")
        if self.attention_reduce_dtype not in ("float32", self.dtype):
            _fail(self, "attention_reduce_dtype", f"float32 or {self.dtype}, which --dtype is")
        if self.master_weights and self.dtype == "float32":
            _fail(self, "master_weights", "left out with --dtype float32, because weights are float32 then anyway")
        if not self.weight_decay < math.inf:
            _fail(self, "weight_decay", "finite")
        if self.schedule == "constant" and self.warmup_steps is not None:
            _fail(self, "warmup_steps", "left out with --schedule constant, which has no warm-up")
        if self.context is not None:
            if self.homes != "head-tail":
                _fail(self, "context", "left out without --homes head-tail")
            if self.context > self.data_ranks:
                _fail(self, "context", f"at most the {self.data_ranks} data ranks")
        if self.compare and self.balance == "off":
            _fail(self, "balance", "left out with --compare, which runs every step both with and without balance")
        self._check_split()
        if not self.name or self.name in (".", "..") or "/" in self.name or "\0" in self.name:
            _fail(self, "name", "the name of a folder, without '/'")
        for name in ("name", "runs_dir", "export"):
            try:
                str(getattr(self, name)).encode()
            except UnicodeEncodeError:
                _fail(self, name, "a path in UTF-8, which packages that write there need")

    def _check_split(self) -> None:
        if self.ranks % (self.pipeline * self.tensor):
            _fail(self, "ranks", f"a multiple of --pipeline {self.pipeline} times --tensor {self.tensor}")
        if self.pipeline == 1:
            for name in ("chunks", "layers_per_stage"):
                if getattr(self, name) != getattr(TrainConfig, name):
                    _fail(self, name, "left out without --pipeline")
        if self.chunks > 1 and self.micro_batches % self.pipeline:
            _fail(self, "chunks", f"1, or --micro-batches ({self.micro_batches}) a multiple of --pipeline")
        if not self.is_split:
            return
        how = self.how_split
        if self.compile:
            _fail(self, "compile", f"left out with {how}: the plan of a call depends on the tick it runs in")
        if self.retain_bytes:
            _fail(self, "retain_bytes", f"0 with {how}: a backward tick has other servers than the forward tick")
        if self.fsdp and self.ping_pong:
            _fail(self, "ping_pong", f"left out with {how} and --fsdp")
        self.stage_layers()

    def stage_layers(self) -> list[int] | None:
        """The numbers in `--layers-per-stage`; None without it."""
        if self.layers_per_stage is None:
            return None
        words = self.layers_per_stage.split(",")
        found = [int(word) if word.strip().isdecimal() else 0 for word in words]
        if len(found) != self.pipeline or min(found) < 1:
            _fail(
                self, "layers_per_stage", f"{self.pipeline} positive numbers, such as {','.join('2' * self.pipeline)}"
            )
        return found

    def _check_tiny(self) -> None:
        heads, kv_heads, hidden = (self.tiny(name) for name in ("heads", "kv_heads", "hidden"))
        if heads % kv_heads:
            _fail(self, "kv_heads", f"a divisor of --heads ({heads})", kv_heads)
        if hidden % heads or hidden // heads % 8 or hidden // heads > LARGEST_DIM:
            size = f"a head size that is a multiple of 8 and at most {LARGEST_DIM}"
            _fail(self, "hidden", f"--heads ({heads}) times {size}", hidden)

    def tiny(self, name: str) -> int:
        """A number of the tiny model's shape: the given one, or the default."""
        value = getattr(self, name)
        return TINY[name] if value is None else int(value)

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        return WARMUP_STEPS if self.warmup_steps is None else self.warmup_steps

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in which attention and matrix products are computed."""
        return DTYPES[self.dtype]

    @property
    def torch_reduce_dtype(self) -> torch.dtype:
        """The dtype in which contributions to gradients of keys and values travel."""
        return DTYPES[self.attention_reduce_dtype]

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the weights, and therefore of the optimizer's state."""
        return torch.float32 if self.master_weights else self.torch_dtype

    @property
    def kept_fraction(self) -> float:
        """The fraction of each document that is kept."""
        if self.doc_scale is not None:
            return self.doc_scale
        return STANDARD_LIBRARY_SCALE if self.data is None else 1.0

    @property
    def is_split(self) -> bool:
        """Whether processes share the model: by pipeline or tensor parallelism."""
        return self.pipeline * self.tensor > 1

    @property
    def how_split(self) -> str:
        """The option by which processes share the model."""
        return "--pipeline" if self.pipeline > 1 else "--tensor"

    @property
    def data_ranks(self) -> int:
        """The ranks that hold different rows of a micro-batch."""
        return self.ranks // (self.pipeline * self.tensor)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        if self.accumulate is not None:
            return self.accumulate
        return 2 * self.pipeline if self.pipeline > 1 else 1

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of all ranks in a micro-batch. They alone decide which documents it holds."""
        return self.data_ranks * self.tokens_per_rank

    @property
    def most_rows(self) -> int:
        """Rows that a rank may hold. With --context, parts of a document differ by a row or two; few are long."""
        return self.tokens_per_rank + 4 * (self.context or 0)

    def as_json(self) -> dict[str, Any]:
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @staticmethod
    def from_json(values: dict[str, Any]) -> TrainConfig:
        """The inverse of `as_json`. Options that a later version added take their defaults. Raises ConfigError."""
        read: dict[str, Any] = {}
        for option in fields(TrainConfig):
            if option.name not in values:
                continue
            value, kind = values[option.name], OPTION_TYPES[option.name]
            if value is None and option.default is None:
                read[option.name] = None
                continue
            if type(value) not in _WRITTEN_AS[kind]:
                raise ConfigError(f"{option_name(option.name)} is {value!r}, must be of type {kind.__name__}")
            try:
                read[option.name] = kind(value)
            except OverflowError as error:
                raise ConfigError(f"{option_name(option.name)} is above the largest {kind.__name__}") from error
        return TrainConfig(**read)


_LEAST: dict[str, float] = {
    "ranks": 1, "steps": 1, "tokens_per_rank": 1, "accumulate": 1, "pipeline": 1, "chunks": 1, "tensor": 1, "hidden": 1,
    "layers": 1, "heads": 1, "kv_heads": 1, "seed": 0, "retain_bytes": 0, "checkpoint_every": 0, "keep_checkpoints": 1,
    "context": 1, "eval_every": 0, "eval_steps": 1, "warmup_steps": 0, "weight_decay": 0,
}  # fmt: skip

OPTION_TYPES: dict[str, Callable[[str], Any]] = {
    "ranks": int, "steps": int, "tokens_per_rank": int, "accumulate": int, "pipeline": int, "chunks": int,
    "layers_per_stage": str, "tensor": int, "data": Path, "doc_scale": float, "tokenizer": Path, "model": str,
    "hidden": int, "layers": int, "heads": int, "kv_heads": int, "dtype": str, "master_weights": bool, "lr": float,
    "schedule": str, "warmup_steps": int, "weight_decay": float, "clip_norm": float, "seed": int, "balance": str,
    "homes": str, "context": int, "tolerance": float, "retain_bytes": int, "attention_reduce_dtype": str,
    "compare": bool, "fsdp": bool,
    "compile": bool, "checkpoint_activations": bool, "ping_pong": bool, "eval_data": Path, "eval_fraction": float,
    "eval_every": int, "eval_steps": int, "checkpoint_every": int, "keep_checkpoints": int, "export": Path,
    "trace": str, "nsys": bool, "log_memory": bool, "track": str, "timeout": float, "name": str, "runs_dir": Path,
}  # fmt: skip
"""The function by which the command line reads each field."""

_WRITTEN_AS: dict[Any, tuple[type, ...]] = {
    int: (int,), float: (int, float), bool: (bool,), str: (str,), Path: (str,)
}  # fmt: skip
"""The types that JSON may have for each of these types."""


def option_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _fail(config: TrainConfig, name: str, allowed: str, value: Any = None) -> None:
    value = getattr(config, name) if value is None else value
    raise ConfigError(f"{option_name(name)} is {value}, must be {allowed}")
