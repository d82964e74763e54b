"""What a simulated step runs on: links, device, cluster, model and parallelism. All values are checked."""

from __future__ import annotations

import dataclasses
import math

from distca.arguments import is_number
from distca.errors import InvalidArgumentError
from distca.heads import DTYPES, Heads
from distca.simulator.device import Device, interpolated
from distca.simulator.values import check, positive, whole

#: The most ranks, those of a tensor group counted once: what moves between them is a matrix.
MOST_HOMES = 4096


COLLECTIVES = {
    "all_gather": None,
    "reduce_scatter": None,
    "all_reduce": None,
    "fsdp_gather": "all_gather",
    "fsdp_reduce": "reduce_scatter",
}
"""What rings do, and whose rates they take if they have none. An all-reduce is two rings.

The rates of FSDP's have in them all that FSDP does for a gather of weights or a reduction of gradients, copies too.
"""


@dataclasses.dataclass(frozen=True)
class Collective:
    """The rate of a ring.

    Attributes:
        bytes: what each rank sends and receives.
        bandwidth: bytes a second, latency included.
        what: one of `COLLECTIVES` that takes this rate; None: those without a rate of their own.
    """

    bytes: int
    bandwidth: float
    what: str | None = None

    def __post_init__(self) -> None:
        whole("collectives", self, "bytes")
        positive("collectives", self, "bandwidth")
        known = self.what is None or self.what in COLLECTIVES
        check("collectives: what", self.what, known, f"one of {', '.join(COLLECTIVES)}")


@dataclasses.dataclass(frozen=True)
class LinkClass:
    """Links of one kind. They are full duplex.

    Attributes:
        bandwidth: bytes a second of one rank, in and out alike.
        latency: seconds from the last byte sent to the last byte received, and of each step of a ring.
        node_bandwidth: bytes a second of all ranks of a node together, in and out alike. None: the ranks' own suffice.
        collectives: rates of rings by size, interpolated on a logarithmic scale. A ring of which no rate is known
            takes that of all kinds, or the bandwidth and a latency a step.
    """

    bandwidth: float
    latency: float
    node_bandwidth: float | None = None
    collectives: tuple[Collective, ...] = ()

    def __post_init__(self) -> None:
        positive("link", self, "bandwidth")
        check("link: latency", self.latency, is_number(self.latency, 0, 1e3), "seconds from 0 on")
        if self.node_bandwidth is not None:
            positive("link", self, "node_bandwidth")

    def ring_seconds(self, travels: float, bandwidth: float, steps: int, what: str) -> float:
        """Seconds of a ring of so many steps in which each rank sends and receives so many bytes.

        `bandwidth` is what the links of a rank allow if no rate is known. `what` is one of `COLLECTIVES`.
        """
        rates = self.rates_of(what) or self.rates_of(COLLECTIVES[what]) or self.rates_of(None)
        points = sorted((math.log(one.bytes), one.bandwidth) for one in rates)
        if not points:
            return travels / bandwidth + steps * self.latency
        return travels / interpolated(math.log(travels), points)

    def rates_of(self, what: str | None) -> list[Collective]:
        """The known rates of one of `COLLECTIVES`; of None those of rings without one of their own."""
        return [one for one in self.collectives if one.what == what]


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
        whole("cluster", self, "ranks ranks_per_node")
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
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``, of weights and activations.
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check("model: dtype", self.dtype, self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        whole("model", self, "layers hidden intermediate vocabulary q_heads kv_heads head_dim")
        self.heads  # noqa: B018 - raises if there are no such heads

    @property
    def heads(self) -> Heads:
        """The heads."""
        return Heads(q=self.q_heads, kv=self.kv_heads, dim=self.head_dim, dtype=DTYPES[self.dtype])

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in weights and activations."""
        return DTYPES[self.dtype].itemsize

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
        save_attention: whether what core attention returned is kept then, and the rest is run again up to what
            the last product needs, as `distca train` does.
        shard_optimizer: whether the optimizer is sharded over the data and context ranks. If not, gradients are added
            up on all of them, and each takes the whole step.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1
    chunks: int = 1
    fsdp: bool = False
    recompute: bool = False
    save_attention: bool = False
    shard_optimizer: bool = True

    def __post_init__(self) -> None:
        whole("parallelism", self, "data context tensor pipeline micro_batches chunks")
        for name in ("fsdp", "recompute", "save_attention", "shard_optimizer"):
            value = getattr(self, name)
            check(f"parallelism: {name}", value, isinstance(value, bool), "true or false")
        check("parallelism: save_attention", True, self.recompute or not self.save_attention, "false without recompute")

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
        homes = product // self.tensor
        if homes > MOST_HOMES:
            raise InvalidArgumentError(
                f"parallelism: data x context x pipeline = {homes:,}; at most {MOST_HOMES:,} are modelled"
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
