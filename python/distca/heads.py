"""The shape of attention heads, shared by plans and contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, TypeAlias

import torch

from distca.arguments import check_type, is_whole
from distca.errors import InvalidArgumentError

if TYPE_CHECKING:
    from distca.planner.layout import Window

#: The dtypes by their short names, for the command line.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Their numbers in a plan.
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOST_HEADS, LARGEST_DIM = 4096, 512


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of one attention layer on one rank: q ``[T, q, dim]``, k ``[T, kv, dim]``, v ``[T, kv, v_dim]``.

    Args:
        q: number of query heads, a multiple of ``kv``, at most 4096.
        kv: number of key/value heads.
        dim: dimension of a query or key head, a multiple of 8 up to 512.
        v_dim: dimension of a value head, a multiple of 8 up to 512; ``dim`` by default.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        InvalidArgumentError: a number or the dtype is not allowed.

    Examples:
        >>> heads = distca.Heads(q=32, kv=8, dim=128, dtype=torch.bfloat16)
        >>> heads.row_bytes  # q and out of 32 heads, k and v of 8, 2 bytes a number
        20480
    """

    q: int
    kv: int
    dim: int
    v_dim: int | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.v_dim is None:
            object.__setattr__(self, "v_dim", self.dim)
        if self.dtype not in DTYPE_NUMBERS:
            allowed = ", ".join(map(str, DTYPE_NUMBERS))
            raise InvalidArgumentError(f"heads: dtype = {self.dtype}; {allowed} are supported")
        for name in ("q", "kv", "dim", "v_dim"):
            number = getattr(self, name)
            if not is_whole(number, -(2**62)):
                raise InvalidArgumentError(f"heads: {name} = {number!r}; an integer is expected")
            object.__setattr__(self, name, index(number))
        if not (1 <= self.kv <= self.q <= _MOST_HEADS and self.q % self.kv == 0):
            raise InvalidArgumentError(
                f"heads: {self.q} query heads and {self.kv} key/value heads; 1 to {_MOST_HEADS} query heads that are a "
                "multiple of the key/value heads are allowed"
            )
        if not all(8 <= dim <= LARGEST_DIM and dim % 8 == 0 for dim in (self.dim, self.value_dim)):
            raise InvalidArgumentError(
                f"heads: dim = {self.dim}, v_dim = {self.v_dim}; multiples of 8 from 8 to {LARGEST_DIM} are allowed"
            )

    def divided(self, tensor_ranks: int) -> Heads:
        """The heads of one of `tensor_ranks` tensor parallel ranks, if these are the heads of the whole model.

        Each has ``q / tensor_ranks`` query heads and ``kv / tensor_ranks`` key/value heads. With fewer key/value heads
        than tensor ranks, each has one key/value head: neighbouring tensor ranks have copies of the same one.

        Raises:
            InvalidArgumentError: the heads cannot be divided so.

        Examples:
            >>> heads = distca.Heads(q=32, kv=4, dim=128)
            >>> [(of_rank.q, of_rank.kv) for of_rank in (heads.divided(2), heads.divided(8))]
            [(16, 2), (4, 1)]
        """
        if not is_whole(tensor_ranks, 1):
            raise InvalidArgumentError(f"heads: {tensor_ranks!r} tensor ranks; a number from 1 on is expected")
        if self.q % tensor_ranks or (self.kv % tensor_ranks and tensor_ranks % self.kv):
            raise InvalidArgumentError(
                f"heads: {self.q} query heads and {self.kv} key/value heads cannot be divided among {tensor_ranks} "
                f"tensor ranks; the query heads must be a multiple of {tensor_ranks}, and the key/value heads a "
                "multiple or a divisor of it. What to change: give the heads of the whole model, or another number of "
                "tensor ranks"
            )
        return dataclasses.replace(self, q=self.q // tensor_ranks, kv=max(self.kv // tensor_ranks, 1))

    @property
    def value_dim(self) -> int:
        """Dimension of a value head, also if ``v_dim`` was not given."""
        assert self.v_dim is not None
        return self.v_dim

    @property
    def dtype_number(self) -> int:
        """The dtype's number in a plan."""
        return DTYPE_NUMBERS[self.dtype]

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """Query heads, key/value heads, dims of a query and a value, and the dtype's number: the core's terms."""
        return self.q, self.kv, self.dim, self.value_dim, self.dtype_number

    @property
    def row_bytes(self) -> int:
        """Bytes of q, k, v and out of one token."""
        return (self.q + self.kv) * (self.dim + self.value_dim) * self.dtype.itemsize


#: The heads of a model's layers: one shape, or one for each window where layers differ in both.
LayerHeads: TypeAlias = "Heads | Mapping[Window, Heads]"


def shapes_of(function: str, heads: LayerHeads) -> list[Heads]:
    """The different head shapes of a model's layers. The one with the most bytes a row is first.

    Raises:
        InvalidArgumentError: `heads` are no heads. The message names the function that got them.
    """
    by_name = {f"heads[{w!r}]": of for w, of in heads.items()} if isinstance(heads, Mapping) else {"heads": heads}
    for name, shape in by_name.items():
        check_type(function, name, shape, Heads, "distca.Heads(q=8, kv=2, dim=64)")
    if not by_name:
        raise InvalidArgumentError(f"{function}: heads = {heads!r}; a distca.Heads for each window is expected")
    return sorted(set(by_name.values()), key=lambda shape: (-shape.row_bytes, shape.numbers))


def divided(heads: LayerHeads, tensor_ranks: int) -> LayerHeads:
    """`Heads.divided` for all layers."""
    if isinstance(heads, Mapping):
        return {window: of_window.divided(tensor_ranks) for window, of_window in heads.items()}
    return heads.divided(tensor_ranks)
