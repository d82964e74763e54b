"""The options of `pretrain_llama.py`. Each is an argument, and an environment variable of the same name in capitals."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from distca.errors import InvalidArgumentError
from distca.planner.layout import Layout

Attention = Literal["distca", "megatron"]
Recompute = Literal["none", "selective", "full"]
ReduceDtype = Literal["float32", "bfloat16"]
Homes = Literal["packed", "head-tail"]


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Options:
    """What a run does. 0, empty or None stands for a default that depends on other options (`resolved`)."""

    model: str = _option(
        "",
        "tiny, llama-8b, llama-34b, qwen3-8b, or a config.json of a Llama or Qwen3 (default: llama-8b, on CPU tiny)",
    )
    layers: int = _option(0, "number of layers, if other than the model's")
    attention: Attention = _option(
        "distca", "distca, or megatron: Megatron's own attention and schedule (on CPU PyTorch's attention per document)"
    )
    tp_size: int = _option(1, "tensor parallel size")
    pp_size: int = _option(1, "pipeline stages")
    cp_size: int = _option(1, "data ranks over whose rows documents are packed together (context parallel size)")
    homes: Homes = _option(
        "packed",
        "with --cp-size above 1 and distca: packed, a document goes on on the next rank; or head-tail, long documents "
        "are on many of these ranks, each of which holds a part from either end",
    )
    vpp_size: int = _option(1, "chunks of layers of each stage (virtual pipeline)")
    ranks: int = _option(0, "CPU processes, where no launcher says it (default: as many as the sizes need, at least 2)")
    tokens_per_rank: int = _option(0, "tokens of a data rank in a micro-batch (default: 65536; tiny 512)")
    max_document: int = _option(0, "documents are cut after so many tokens (default: --tokens-per-rank * --cp-size)")
    micro_batches: int = _option(0, "micro-batches of a step (default: twice --pp-size, without stages 1)")
    steps: int = _option(100, "optimizer steps of the whole run")
    lr: float | None = _option(None, "peak learning rate (default: 3e-4; tiny 3e-3)")
    warmup_steps: int | None = _option(None, "steps in which the rate rises; then it falls as a cosine to a tenth")
    weight_decay: float = _option(0.1, "weight decay of AdamW")
    clip_grad: float = _option(1.0, "largest norm of all gradients; 0 does not clip")
    seed: int = _option(0, "seed of weights and of the order of documents")
    data: Path | None = _option(
        None, "folder of text files, .jsonl, .parquet, or prefix of a Megatron data set (default: Python's own sources)"
    )
    doc_scale: float | None = _option(
        None, "fraction of each document to keep (default: 1/16 of Python's sources, else 1)"
    )
    lengths: Path | None = _option(
        None, "JSON list of document lengths, in the place of --data: random tokens, to measure with"
    )
    tokenizer: Path | None = _option(None, "folder or tokenizer.json of a tokenizer (default: bytes)")
    eval_fraction: float = _option(0.0, "fraction of the documents that is evaluated on and not trained on")
    eval_every: int = _option(0, "steps between evaluations; 0 evaluates at the end")
    eval_steps: int = _option(2, "steps' worth of held-out documents in an evaluation")
    run_dir: Path | None = _option(
        None, "folder of log, checkpoints, TensorBoard; a run in it is resumed (default: a new one in logs)"
    )
    save_every: int = _option(0, "steps between checkpoints; 0 writes one at the end and when stopped")
    keep_checkpoints: int = _option(2, "how many of the last checkpoints stay")
    recompute: Recompute = _option("none", "activation recomputation: none, selective (attention) or full (each layer)")
    sequence_parallel: bool = _option(False, "1 splits norms over the tensor ranks too")
    distributed_optimizer: bool | None = _option(None, "1 shards the optimizer over data ranks (default: with a GPU)")
    ping_pong: bool = _option(
        False,
        "1 runs the layers on two halves of each micro-batch in turns: one computes while rows of the other travel",
    )
    balance: bool = _option(True, "0 computes attention where the rows are, with distca's schedule and kernel")
    compare: int = _option(
        0, "so many rounds of steps with distca, its ping-pong, without balance, and with Megatron's schedule in turn"
    )
    transport: str = _option("auto", "how attention's rows travel, as in distca.init")
    tolerance: float = _option(0.05, "how far the largest attention load may be above the mean")
    attention_reduce_dtype: ReduceDtype = _option(
        "float32",
        "dtype in which contributions of several ranks to the gradients of a key and value travel: float32, or that of "
        "attention, which is half the bytes",
    )
    timeout: float = _option(600.0, "seconds after which a rank that waits for another gives up")

    def resolved(self, *, cuda: bool, world_size: int) -> Options:
        """The options with all defaults filled in, checked against each other.

        Raises:
            InvalidArgumentError: an option is out of range or does not go with another.
        """
        model = self.model or ("llama-8b" if cuda else "tiny")
        tiny = model == "tiny"
        tokens = self.tokens_per_rank or (512 if tiny else 65536)
        filled = dataclasses.replace(
            self,
            model=model,
            ranks=world_size,
            tokens_per_rank=tokens,
            max_document=self.max_document or tokens * self.cp_size,
            micro_batches=self.micro_batches or (2 * self.pp_size if self.pp_size > 1 else 1),
            lr=(3e-3 if tiny else 3e-4) if self.lr is None else self.lr,
            warmup_steps=self.steps // 20 if self.warmup_steps is None else self.warmup_steps,
            distributed_optimizer=cuda if self.distributed_optimizer is None else self.distributed_optimizer,
        )
        filled._check(world_size)
        return filled

    @property
    def cut(self) -> Callable[[list[int], int], Layout] | None:
        """The layout of documents of these lengths on so many ranks; None if they go on on the next rank."""
        if self.attention == "megatron":
            return _over_all if self.cp_size > 1 else None
        return _spread if self.homes == "head-tail" else None

    @property
    def row_multiple(self) -> int:
        """What the rows of a rank are a multiple of where documents are cut head-tail."""
        return self.tp_size if self.sequence_parallel else 1

    def _check(self, world_size: int) -> None:
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) < least:
                raise _bad(name, value, f"must be at least {least}")
        if self.lr is None or self.lr <= 0:
            raise _bad("lr", self.lr, "must be above 0")
        if self.doc_scale is not None and not 0 < self.doc_scale <= 1:
            raise _bad("doc_scale", self.doc_scale, "must be above 0 and at most 1")
        if world_size % (self.tp_size * self.pp_size):
            raise _bad("tp_size", self.tp_size, f"times --pp-size {self.pp_size} must divide the {world_size} ranks")
        data_ranks = world_size // (self.tp_size * self.pp_size)
        if data_ranks % self.cp_size:
            raise _bad("cp_size", self.cp_size, f"must divide the {data_ranks} data ranks")
        if self.homes != "packed" and self.cp_size == 1:
            raise _bad("homes", self.homes, "needs ranks that share documents: --cp-size is 1")
        if self.vpp_size > 1 and self.pp_size == 1:
            raise _bad("vpp_size", self.vpp_size, "needs stages: --pp-size is 1")
        if self.vpp_size > 1 and self.micro_batches % self.pp_size:
            raise _bad("micro_batches", self.micro_batches, f"must be a multiple of --pp-size {self.pp_size}")
        if self.max_document > self.tokens_per_rank * self.cp_size:
            of_rank, ranks = self.tokens_per_rank, self.cp_size
            raise _bad(
                "max_document", self.max_document, f"must be at most --tokens-per-rank {of_rank} * --cp-size {ranks}"
            )
        if self.sequence_parallel and self.tokens_per_rank % self.tp_size:
            raise _bad("tokens_per_rank", self.tokens_per_rank, f"must be a multiple of --tp-size {self.tp_size}")
        if self.sequence_parallel and self.tp_size == 1:
            raise _bad("sequence_parallel", True, "needs tensor ranks: --tp-size is 1")
        if self.ping_pong and self.attention != "distca":
            raise _bad("ping_pong", 1, f"needs --attention distca: it is {self.attention}")
        if not 0 <= self.eval_fraction < 1:
            raise _bad("eval_fraction", self.eval_fraction, "must be at least 0 and below 1")
        if self.lengths is not None and (self.data is not None or self.tokenizer is not None):
            raise _bad("lengths", self.lengths, "does not go with --data and --tokenizer")
        if self.eval_every and not self.eval_fraction:
            raise _bad("eval_every", self.eval_every, "needs --eval-fraction")
        if self.warmup_steps is None or not 0 <= self.warmup_steps < self.steps:
            raise _bad("warmup_steps", self.warmup_steps, f"must be at least 0 and below --steps {self.steps}")

    def as_json(self) -> dict[str, Any]:
        """The options by name, as JSON takes them."""
        return {f.name: str(v) if isinstance(v := getattr(self, f.name), Path) else v for f in fields(self)}


def _over_all(lengths: list[int], ranks: int) -> Layout:
    return Layout.head_tail(lengths, ranks=ranks)


def _spread(lengths: list[int], ranks: int) -> Layout:
    return Layout.spread(lengths, ranks=ranks)


_LEAST = {
    "layers": 0,
    "tp_size": 1,
    "pp_size": 1,
    "cp_size": 1,
    "vpp_size": 1,
    "tokens_per_rank": 2,
    "max_document": 2,
    "micro_batches": 1,
    "steps": 1,
    "weight_decay": 0,
    "clip_grad": 0,
    "eval_every": 0,
    "eval_steps": 1,
    "save_every": 0,
    "keep_checkpoints": 1,
    "compare": 0,
    "tolerance": 0,
    "timeout": 0.1,
}


def argument(name: str) -> str:
    """An option as the command line has it."""
    return "--" + name.replace("_", "-")


def _bad(name: str, value: object, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{argument(name)} ({name.upper()}) is {value}, {what}")


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Options:
    """Options from arguments, and from environment variables for those that are not among the arguments.

    A variable that is set to nothing counts as not set.

    Raises:
        InvalidArgumentError: a variable has a wrong value. A wrong argument exits with 2, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="pretrain_llama.py",
        description=__doc__,
        epilog="Every option may be given as a variable: TP_SIZE=2 is --tp-size 2. An argument counts more.",
        allow_abbrev=False,  # pretrain_llama.sh looks for some of them
    )
    parsers = {f.name: _Parser(f) for f in fields(Options)}
    for one in fields(Options):
        parser.add_argument(argument(one.name), type=parsers[one.name], default=None, help=one.metadata["help"])
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    for name, read in parsers.items():
        text = environment.get(name.upper(), "")
        if text and name not in given:
            try:
                given[name] = read(text)
            except argparse.ArgumentTypeError as error:
                raise InvalidArgumentError(f"{name.upper()} is {text!r}: {error}") from None
    return Options(**given)


class _Parser:
    """Reads the text of one option."""

    def __init__(self, option: dataclasses.Field[Any]) -> None:
        self._type = str(option.type).removesuffix(" | None")
        choices = {"Attention": get_args(Attention), "Homes": get_args(Homes), "Recompute": get_args(Recompute)}
        choices["ReduceDtype"] = get_args(ReduceDtype)
        self._choices = choices.get(self._type, ())

    def __call__(self, text: str) -> Any:
        if self._choices and text not in self._choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(self._choices)}")
        if self._type == "bool":
            if text not in ("0", "1"):
                raise argparse.ArgumentTypeError("must be 0 or 1")
            return text == "1"
        if self._type in ("int", "float"):
            try:
                value: float = {"int": int, "float": float}[self._type](text)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise argparse.ArgumentTypeError(f"must be {'a whole number' if self._type == 'int' else 'a number'}")
            return value
        return Path(text) if self._type == "Path" else text
