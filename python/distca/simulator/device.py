"""What a rank computes with: a table of rates, published or measured by `distca profile --cluster`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from distca.arguments import is_number
from distca.errors import InvalidArgumentError
from distca.planner.cost import CostModel
from distca.simulator.values import check, positive, whole

PARTS = ("norm", "rotary", "activation", "residual", "sum", "loss", "embedding", "optimizer")
"""What is neither attention nor a matrix product, by name. ``sum`` adds up gradients of what several parts read."""


class Seconds(NamedTuple):
    """Seconds of forward and of backward."""

    forward: float
    backward: float

    def __add__(self, other: object) -> Seconds:
        """The sum of both."""
        assert isinstance(other, Seconds)
        return Seconds(self.forward + other.forward, self.backward + other.backward)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The rate of one matrix product, ``[m, k] @ [k, n]``: `tflops` of 2 m n k operations.

    `backward_tflops` is the rate of the two products of backward together, of 4 m n k operations; None: the same.
    """

    m: int
    n: int
    k: int
    tflops: float
    backward_tflops: float | None = None

    def __post_init__(self) -> None:
        whole("gemm", self, "m n k")
        positive("gemm", self, "tflops")
        if self.backward_tflops is not None:
            positive("gemm", self, "backward_tflops")

    @property
    def rates(self) -> Seconds:
        """The rates of forward and backward, in operations a second."""
        return Seconds(self.tflops * 1e12, (self.backward_tflops or self.tflops) * 1e12)


@dataclasses.dataclass(frozen=True)
class PartTime:
    """The time of one of `PARTS`.

    Attributes:
        part: its name.
        numbers: numbers of the array that it works on.
        forward, backward: seconds.
    """

    part: str
    numbers: int
    forward: float
    backward: float = 0.0

    def __post_init__(self) -> None:
        check("parts: part", self.part, self.part in PARTS, f"one of {', '.join(PARTS)}")
        whole("parts", self, "numbers")
        positive("parts", self, "forward")
        check("parts: backward", self.backward, is_number(self.backward, 0, math.inf), "seconds from 0 on")


@dataclasses.dataclass(frozen=True)
class Device:
    """What a rank computes with.

    Attributes:
        attention: a cost table with times: the name of one, a file of `distca profile`, or the content of such a file.
        gemms: rates of matrix products. A product takes the rate of the shape ``(n, k)`` that is nearest, interpolated
            between rows ``m`` on a logarithmic scale, and constant beyond the ends.
        peak_tflops: the rate that MFU is relative to.
        memory_bandwidth: bytes a second of what is bound by memory.
        memory: bytes of a rank.
        launch: seconds that a kernel takes besides.
        parts: times of what memory binds. A part without any takes its bytes over `memory_bandwidth`.
        layer_overhead: seconds that the host needs besides in each layer, in forward and again in backward.
        recompute_overhead: seconds that the host needs besides for each layer that is run again but for its attention.
        call_overhead: seconds that each call of core attention takes besides.
        copy_bandwidth: bytes a second at which a rank itself copies rows to and from peers' memory, as the CPU's
            transports do. It then computes nothing meanwhile, and waits for the receiver's credit before. None: rows
            travel while the device computes.
        contention: how many times as long a rank computes while all other ranks of the node compute, over while they
            wait. Processes of one machine share its memory; a GPU has its own: 1.
    """

    attention: str | Mapping[str, Any]
    gemms: tuple[Gemm, ...]
    peak_tflops: float
    memory_bandwidth: float
    memory: float
    launch: float = 0.0
    parts: tuple[PartTime, ...] = ()
    layer_overhead: float = 0.0
    recompute_overhead: float = 0.0
    call_overhead: float = 0.0
    copy_bandwidth: float | None = None
    contention: float = 1.0

    def __post_init__(self) -> None:
        positive("device", self, "peak_tflops memory_bandwidth memory")
        for name in ("launch", "layer_overhead", "recompute_overhead", "call_overhead"):
            value = getattr(self, name)
            check(f"device: {name}", value, is_number(value, 0, 1), "seconds from 0 to 1")
        if self.copy_bandwidth is not None:
            positive("device", self, "copy_bandwidth")
        check("device: contention", self.contention, is_number(self.contention, 1, 100), "from 1 to 100")
        check("device: gemms", self.gemms, len(self.gemms) > 0, "at least one rate")
        check("device: attention", self.attention, isinstance(self.attention, (str, Mapping)), "a cost table's name")
        if self.cost("forward").unit_ns is None:
            raise InvalidArgumentError(
                f"device: attention = {self.attention!r} has no times; name a table of `distca profile`, or h200"
            )

    def cost(self, *phases: str) -> CostModel:
        """The cost model of these phases of attention; of both by default."""
        phases = phases or ("forward", "backward")
        if phases not in self._costs:
            if isinstance(self.attention, str):
                self._costs[phases] = CostModel.load(self.attention, phases=phases)
            else:
                self._costs[phases] = CostModel.of_table(self.attention, phases=phases)
        return self._costs[phases]

    @functools.cached_property
    def _costs(self) -> dict[tuple[str, ...], CostModel]:
        return {}

    def product(self, m: float, n: int, k: int) -> Seconds:
        """Seconds of a matrix product ``[m, k] @ [k, n]`` and of the two of its backward."""
        if m <= 0:
            return Seconds(0.0, 0.0)
        points = self._points(n, k)
        x = math.log(m)
        forward, backward = (interpolated(x, [(math.log(g.m), g.rates[phase]) for g in points]) for phase in range(2))
        return Seconds(2.0 * m * n * k / forward + self.launch, 4.0 * m * n * k / backward + 2 * self.launch)

    def _points(self, n: int, k: int) -> list[Gemm]:
        """The known rates of the shape that is nearest, by rows."""
        if (n, k) not in self._nearest:
            self._nearest[n, k] = self._nearest_points(n, k)
        return self._nearest[n, k]

    @functools.cached_property
    def _nearest(self) -> dict[tuple[int, int], list[Gemm]]:
        return {}

    def _nearest_points(self, n: int, k: int) -> list[Gemm]:
        def distance(gemm: Gemm) -> float:
            return abs(math.log(gemm.n / n)) + abs(math.log(gemm.k / k))

        nearest = min(map(distance, self.gemms))
        return sorted((g for g in self.gemms if distance(g) <= nearest + 1e-9), key=lambda g: g.m)

    def part(self, name: str, numbers: float, num_bytes: float) -> Seconds:
        """Seconds of one of `PARTS` on an array of so many numbers, which reads and writes so many bytes."""
        if numbers <= 0:
            return Seconds(0.0, 0.0)
        points = sorted((one for one in self.parts if one.part == name), key=lambda one: one.numbers)
        if not points:
            once = num_bytes / self.memory_bandwidth + (self.launch if num_bytes else 0.0)
            return Seconds(once, 2 * once)
        x = math.log(numbers)
        forward, backward = (
            interpolated(x, [(math.log(p.numbers), (p.forward, p.backward)[phase] / p.numbers) for p in points])
            for phase in range(2)
        )
        return Seconds(numbers * forward, numbers * backward)


def interpolated(x: float, points: list[tuple[float, float]]) -> float:
    """The value at x between ascending points, linearly; the end's value beyond the ends."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]
