"""The shape of attention heads, shared by plans and contexts."""

from __future__ import annotations

import dataclasses

import torch

from distca.errors import InvalidArgumentError

#: Short names, for the command line.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of one attention layer on one rank: q ``[T, q, dim]``, k ``[T, kv, dim]``, v ``[T, kv, v_dim]``.

    Args:
        q: number of query heads, a multiple of ``kv``.
        kv: number of key/value heads.
        dim: dimension of a query or key head, a multiple of 8 up to 256.
        v_dim: dimension of a value head; ``dim`` by default.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.
    """

    q: int
    kv: int
    dim: int
    v_dim: int | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.v_dim is None:
            object.__setattr__(self, "v_dim", self.dim)
        if self.dtype not in _DTYPE_NUMBERS:
            allowed = ", ".join(map(str, _DTYPE_NUMBERS))
            raise InvalidArgumentError(f"heads: dtype = {self.dtype}; {allowed} are supported")

    @property
    def value_dim(self) -> int:
        """Dimension of a value head."""
        assert self.v_dim is not None
        return self.v_dim

    @property
    def dtype_number(self) -> int:
        """The dtype as plans store it."""
        return _DTYPE_NUMBERS[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of q, k, v and out of one token."""
        return (self.q + self.kv) * (self.dim + self.value_dim) * self.dtype.itemsize
