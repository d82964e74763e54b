"""What a simulated step runs on: links, device, cluster, model and parallelism. All values are checked."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from distca.arguments import is_number, is_whole
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.planner.cost import CostModel


def _check(what: str, value: object, allowed: bool, expected: str) -> None:
    if not allowed:
        raise InvalidArgumentError(f"{what} = {value!r}; {expected} is expected")


def _positive(where: str, of: object, names: str) -> None:
    for name in names.split():
        value = getattr(of, name)
        _check(f"{where}: {name}", value, is_number(value, 1e-30, math.inf), "a positive number")


def _whole(where: str, of: object, names: str) -> None:
    for name in names.split():
        value = getattr(of, name)
        _check(f"{where}: {name}", value, is_whole(value, 1), "a whole number from 1 on")


@dataclasses.dataclass(frozen=True)
class LinkClass:
    """Links of one kind. They are full duplex.

    Attributes:
        bandwidth: bytes a second of one rank, in and out alike.
        latency: seconds from the last byte sent to the last byte received, and of each step of a ring.
        node_bandwidth: bytes a second of all ranks of a node together, in and out alike. None: the ranks' own suffice.
    """

    bandwidth: float
    latency: float
    node_bandwidth: float | None = None

    def __post_init__(self) -> None:
        _positive("link", self, "bandwidth")
        _check("link: latency", self.latency, is_number(self.latency, 0, 1e3), "seconds from 0 on")
        if self.node_bandwidth is not None:
            _positive("link", self, "node_bandwidth")


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The rate of one matrix product, ``[m, k] @ [k, n]``: `tflops` of 2 m n k operations."""

    m: int
    n: int
    k: int
    tflops: float

    def __post_init__(self) -> None:
        _whole("gemm", self, "m n k")
        _positive("gemm", self, "tflops")


@dataclasses.dataclass(frozen=True)
class Device:
    """What a rank computes with.

    Attributes:
        attention: a cost table with times, as `CostModel.load` takes: the name of one, or a file of `distca profile`.
        gemms: rates of matrix products. A product takes the rate of the shape ``(n, k)`` that is nearest, interpolated
            between rows ``m`` on a logarithmic scale, and constant beyond the ends.
        peak_tflops: the rate that MFU is relative to.
        memory_bandwidth: bytes a second of what is bound by memory.
        memory: bytes of a rank.
        launch: seconds that a kernel takes besides.
    """

    attention: str
    gemms: tuple[Gemm, ...]
    peak_tflops: float
    memory_bandwidth: float
    memory: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        _positive("device", self, "peak_tflops memory_bandwidth memory")
        _check("device: launch", self.launch, is_number(self.launch, 0, 1), "seconds from 0 to 1")
        _check("device: gemms", self.gemms, len(self.gemms) > 0, "at least one rate")
        _check("device: attention", self.attention, isinstance(self.attention, str), "the name of a cost table")
        if self.cost("forward").unit_ns is None:
            raise InvalidArgumentError(
                f"device: attention = {self.attention!r} has no times; name a table of `distca profile`, or h200"
            )

    def cost(self, *phases: str) -> CostModel:
        """The cost model of these phases of attention; of both by default."""
        return _cost(self.attention, phases or ("forward", "backward"))

    def gemm_seconds(self, m: float, n: int, k: int) -> float:
        """Seconds of a matrix product ``[m, k] @ [k, n]``."""
        if m <= 0:
            return 0.0
        nearest = min(abs(math.log(g.n / n)) + abs(math.log(g.k / k)) for g in self.gemms)
        points = sorted(
            (math.log(g.m), g.tflops)
            for g in self.gemms
            if abs(math.log(g.n / n)) + abs(math.log(g.k / k)) <= nearest + 1e-9
        )
        x = math.log(m)
        rate = points[0][1] if x <= points[0][0] else points[-1][1]
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
            if x0 <= x <= x1 and x1 > x0:
                rate = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        return 2.0 * m * n * k / (rate * 1e12) + self.launch


@functools.lru_cache(maxsize=32)
def _cost(source: str, phases: tuple[str, ...]) -> CostModel:
    return CostModel.load(source, phases=phases)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Ranks, numbered node by node, each with a device.

    Attributes:
        ranks: number of devices.
        ranks_per_node: number of neighbouring ranks that are one node; it divides `ranks`, or is larger.
        inside: the links between ranks of a node.
        between: the links between nodes.
        device: the device of every rank.
    """

    ranks: int
    ranks_per_node: int
    inside: LinkClass
    between: LinkClass
    device: Device

    def __post_init__(self) -> None:
        _whole("cluster", self, "ranks ranks_per_node")
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise InvalidArgumentError(
                f"cluster: {self.ranks} ranks on nodes of {self.ranks_per_node}; give a multiple of the ranks of a node"
            )


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder of Llama's kind: grouped queries, three matrices in the MLP, two norms a layer.

    Attributes:
        layers, hidden, intermediate, vocabulary: as in its config.json.
        q_heads, kv_heads, head_dim: the heads of attention.
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    q_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _whole("model", self, "layers hidden intermediate vocabulary q_heads kv_heads head_dim")
        self.heads  # noqa: B018 - raises if there are no such heads

    @property
    def heads(self) -> Heads:
        """The heads, in bfloat16."""
        return Heads(q=self.q_heads, kv=self.kv_heads, dim=self.head_dim, dtype=torch.bfloat16)

    @property
    def layer_weights(self) -> int:
        """Numbers in the weights of a layer."""
        attention = self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def head_weights(self) -> int:
        """Numbers in the matrix that makes logits; the embedding has as many."""
        return self.hidden * self.vocabulary

    def flop(self, lengths: list[int]) -> float:
        """Operations of forward and backward of these documents: 6 a weight and token, 12 a head, dim and pair."""
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        dense = 6.0 * sum(lengths) * (self.layers * self.layer_weights + self.head_weights)
        return dense + 12.0 * self.layers * self.q_heads * self.head_dim * pairs


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """How the ranks share a step. Tensor ranks are nearest to each other, then context, data and pipeline ranks.

    Attributes:
        data, context, tensor, pipeline: numbers of ranks. Their product is the cluster's ranks.
        micro_batches: micro-batches of a step.
        chunks: chunks of layers of a stage, for the ticks of distca.
        fsdp: whether weights are sharded over the data and context ranks. A layer's weights are gathered one layer
            ahead.
        recompute: whether a layer's forward is run again in its backward.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1
    chunks: int = 1
    fsdp: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        _whole("parallelism", self, "data context tensor pipeline micro_batches chunks")
        for name in ("fsdp", "recompute"):
            value = getattr(self, name)
            _check(f"parallelism: {name}", value, isinstance(value, bool), "true or false")

    @property
    def homes(self) -> int:
        """Ranks of a stage that hold different rows: data times context ranks."""
        return self.data * self.context

    def check(self, cluster: Cluster, model: Model) -> None:
        """Raises InvalidArgumentError unless this model can run like this on this cluster."""
        product = self.homes * self.tensor * self.pipeline
        if product != cluster.ranks:
            raise InvalidArgumentError(
                f"parallelism: data {self.data} x context {self.context} x tensor {self.tensor} x pipeline "
                f"{self.pipeline} = {product}; the cluster has {cluster.ranks} ranks"
            )
        if min(cluster.ranks, cluster.ranks_per_node) % self.tensor:
            raise InvalidArgumentError(
                f"parallelism: tensor = {self.tensor}; a divisor of the {cluster.ranks_per_node} ranks of a node is "
                "expected"
            )
        if model.q_heads % self.tensor or (model.kv_heads % self.tensor and self.tensor % model.kv_heads):
            raise InvalidArgumentError(
                f"parallelism: tensor = {self.tensor} cannot share {model.q_heads} query and {model.kv_heads} "
                "key/value heads"
            )
        if model.layers % (self.pipeline * self.chunks):
            raise InvalidArgumentError(
                f"parallelism: pipeline = {self.pipeline} with chunks = {self.chunks} cannot share {model.layers} "
                "layers equally"
            )
        if self.fsdp and self.pipeline > 1:
            raise InvalidArgumentError("parallelism: fsdp with pipeline > 1 is not modelled; leave out one of them")
