"""This machine as a cluster of the simulator: a rank is a process with one thread.

The first rank measures what a rank computes, while the others wait. Then all measure what they do together: how much
they slow each other down, because they share memory, and what they exchange.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distca
from distca.apps.profile import layers, links
from distca.apps.profile.attention import cost_table, grid
from distca.apps.profile.contention import contention
from distca.apps.profile.sharding import sharded_weights
from distca.heads import Heads
from distca.simulator.setup import Model

#: The vocabulary of these models.
VOCABULARY = 1024


def measure_cluster(
    heads: Heads, hidden: Sequence[int], ranks: int, rounds: int, vocabulary: int = VOCABULARY
) -> dict[str, Any]:
    """The content of a cluster's file, measured on this machine.

    Args:
        heads: the heads that attention is measured with, and of which Llamas of these sizes have as many as fit.
        hidden: hidden sizes of the models whose parts are measured.
        ranks: how many processes share the machine.
        rounds: how often; medians count.
        vocabulary: of these models.
    """
    models = [tiny_llama(one, heads, vocabulary) for one in hidden]
    found = distca.launch(_measure, heads, models, rounds, ranks=ranks, threads=1)
    whole = {**found[0][0], **_mean([together for _, together in found])}
    attention = cost_table(heads, whole.pop("attention"))
    put, latency = whole.pop("puts")
    link = {"bandwidth": put, "latency": latency, "collectives": whole.pop("collectives")}
    device = {
        "attention": attention,
        **whole,
        "peak_tflops": max(*(one["tflops"] for one in whole["gemms"]), _attention_tflops(heads, attention["points"])),
        "memory_bandwidth": _memory_bandwidth(whole["parts"]),
        "memory": _memory() / ranks,
        "copy_bandwidth": put,
    }
    return {"ranks": ranks, "ranks_per_node": ranks, "inside": link, "between": link, "device": device}


def tiny_llama(hidden: int, heads: Heads, vocabulary: int) -> Model:
    """A Llama of the proportions of `distca train`, with heads of this kind."""
    q_heads = hidden // heads.dim
    return Model(
        layers=1,
        hidden=hidden,
        intermediate=-(-hidden * 8 // 3 // 32) * 32,
        vocabulary=vocabulary,
        q_heads=q_heads,
        kv_heads=max(1, q_heads * heads.kv // heads.q),
        head_dim=heads.dim,
        dtype="fp32",
    )


def _measure(heads: Heads, models: list[Model], rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the first rank measures alone, and what all ranks measure together."""
    torch.manual_seed(0)
    alone = _measure_alone(heads, models, rounds) if dist.get_rank() == 0 else {}
    dist.barrier()
    return alone, {
        "contention": contention(models, 2 * rounds),
        "call_overhead": links.call_overhead(3 * rounds),
        "puts": links.puts(10 * rounds),
        "collectives": [*links.collectives(5 * rounds), *sharded_weights(models, 5 * rounds)],
    }


def _measure_alone(heads: Heads, models: list[Model], rounds: int) -> dict[str, Any]:
    return {
        "gemms": layers.gemms(models, rounds),
        "parts": layers.parts(models, rounds),
        "layer_overhead": layers.layer_overhead(models[0], 10 * rounds),
        "recompute_overhead": layers.recompute_overhead(models[0], 10 * rounds),
        "attention": grid(heads, rounds, statistics.median),
    }


def _mean(of_ranks: Sequence[Any]) -> Any:
    """The mean over the ranks of every number in tables of the same form."""
    first = of_ranks[0]
    if isinstance(first, dict):
        return {key: _mean([of[key] for of in of_ranks]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_mean(items) for items in zip(*of_ranks, strict=True)]
    return statistics.mean(of_ranks) if isinstance(first, float) else first


def _attention_tflops(heads: Heads, points: Sequence[dict[str, Any]]) -> float:
    """The best rate of attention: 12 operations a head, dim and visible pair, in forward and backward together."""
    rates = []
    for point in points:
        q_rows, kv_rows = point["q_rows"], point["kv_rows"]
        pairs = q_rows * kv_rows - q_rows * (q_rows - 1) / 2
        rates.append(12 * heads.q * heads.dim * pairs / (point["forward_ns"] + point["backward_ns"]) / 1e3)
    return max(rates)


def _memory_bandwidth(parts: Sequence[dict[str, Any]]) -> float:
    """Bytes a second of the largest sum of two arrays, which reads two numbers and writes one, of 4 bytes each."""
    largest = max((one for one in parts if one["part"] == "residual"), key=lambda one: one["numbers"])
    return float(3 * 4 * largest["numbers"] / largest["forward"])


def _memory() -> float:
    """Bytes of memory of this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return 1024.0 * int(line.split()[1])
    raise OSError("/proc/meminfo does not say how much memory there is")
