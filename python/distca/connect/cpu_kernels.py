"""The instruction set of the CPU's kernel, on which the ranks of a group agree.

The bits of a row depend on it. Rows are computed on any rank, so a group has one instruction set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from distca import _C
from distca.errors import InvalidArgumentError


@dataclass(frozen=True)
class CpuKernels:
    """What one rank's kernel can use. The core says it and has the order of instruction sets."""

    choice: str
    """What this rank takes where nobody else has a say."""
    usable: Sequence[str]
    """All that it can use, the best one first. A CPU that has one of them has those behind it."""
    forced: bool = False
    """Whether ``DISTCA_CPU_ISA`` names the choice, which is then the only one that it can use."""

    @classmethod
    def here(cls) -> CpuKernels:
        """Those of this process. Raises InvalidArgumentError if ``DISTCA_CPU_ISA`` names none that is there."""
        choice = _C.cpu_isa()
        if os.environ.get("DISTCA_CPU_ISA"):
            return cls(choice, (choice,), forced=True)
        return cls(choice, tuple(_C.cpu_isas()))

    @property
    def up_to_choice(self) -> Sequence[str]:
        """The choice, and what is weaker."""
        return self.usable[self.usable.index(self.choice) :]


def agreed(ranks: Sequence[CpuKernels]) -> tuple[str, int]:
    """The instruction set of a group, and the first rank that would choose it by itself.

    It is the one that a rank forces. If no rank forces one, it is the weakest of the ranks' choices.

    Raises:
        InvalidArgumentError: two ranks force different ones, or a rank cannot use the one that is forced.
    """
    forcing = [rank for rank, kernels in enumerate(ranks) if kernels.forced]
    if forcing:
        isa = ranks[forcing[0]].choice
        _check_forced(isa, forcing, ranks)
        return isa, forcing[0]
    isa = next(isa for isa in ranks[0].up_to_choice if all(isa in kernels.up_to_choice for kernels in ranks))
    return isa, [kernels.choice for kernels in ranks].index(isa)


def _check_forced(isa: str, forcing: Sequence[int], ranks: Sequence[CpuKernels]) -> None:
    said = f"init: rank {forcing[0]} has DISTCA_CPU_ISA = {isa!r}"
    for rank in forcing:
        if ranks[rank].choice != isa:
            raise InvalidArgumentError(
                f"{said}, rank {rank} has {ranks[rank].choice!r}; bits would depend on who computes a row: give all "
                "ranks the same, or none, and they take the weakest of their choices"
            )
    for rank, kernels in enumerate(ranks):
        if isa not in kernels.usable:
            raise InvalidArgumentError(
                f"{said}, which rank {rank} cannot use; it can use {', '.join(kernels.usable)}: name one that all "
                "ranks can use, or none, and they take the weakest of their choices"
            )
