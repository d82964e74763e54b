"""Small clusters, models and batches for the tests of the simulator."""

from __future__ import annotations

import dataclasses
from typing import Any

from distca.simulator.device import Device, Gemm
from distca.simulator.setup import Cluster, LinkClass, Model, Parallelism

MODEL = Model(layers=4, hidden=1024, intermediate=4096, vocabulary=1000, q_heads=8, kv_heads=4, head_dim=128)
DEVICE = Device(
    attention="h200",
    gemms=(Gemm(8192, 8192, 8192, 800.0),),
    peak_tflops=1000.0,
    memory_bandwidth=4e12,
    memory=1e12,
)

#: Attention takes a nanosecond for each visible pair and query head in forward, and two in backward.
FLAT = dataclasses.replace(
    DEVICE,
    attention={
        "heads": [1],
        "points": [{"q_rows": 1, "kv_rows": 1, "forward_ns": 1.0, "backward_ns": 2.0}],
    },
)


def cluster(ranks: int, per_node: int = 8, *, speed: float = 1.0, **links: Any) -> Cluster:
    """A cluster with links of 400 and 40 GB/s, times `speed`."""
    inside = LinkClass(400e9 * speed, 1e-6)
    between = LinkClass(40e9 * speed, 1e-5, **links)
    return Cluster(ranks, per_node, inside, between, DEVICE)


#: Two micro-batches of four homes with unequal documents.
DOCUMENTS = [
    [[60000], [30000, 30000], [1000] * 60, [20000, 40000]],
    [[10000] * 6, [59000, 1000], [15000] * 4, [60000]],
]
SHAPES = {
    "data": Parallelism(data=4, micro_batches=2),
    "context": Parallelism(data=2, context=2, micro_batches=2, recompute=True),
    "tensor": Parallelism(data=4, tensor=2, micro_batches=2),
    "pipeline": Parallelism(data=4, pipeline=2, micro_batches=2),
    "fsdp": Parallelism(data=4, micro_batches=2, fsdp=True),
}
