"""A context is made of tensor groups and pipelines: which ranks it has, and which groups are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import distca
from support.processes import fault_of
from support.ranks import launch

HEADS = distca.Heads(q=4, kv=2, dim=8)


def _new(*groups: list[int]) -> dist.ProcessGroup:
    """The group that has this process, of these."""
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)


def _init(**options: Any) -> distca.Context:
    return distca.init(**{"max_tokens": 8, "heads": HEADS, "timeout": 20.0} | options)


def _wrong() -> list[tuple[str, str]]:
    """What every mistake says."""
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    three = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    uneven, pairs = _new([0, 1, 2], [3]), mesh.get_group("tp")
    mistakes: dict[str, dict[str, Any]] = {
        "uneven": {"tensor_parallel": uneven},
        "heads": {"tensor_parallel": three["tp"], "heads": distca.Heads(q=6, kv=2, dim=8)},
        "mesh": {"tensor_parallel": mesh},
        "type": {"tensor_parallel": 2},
        "group too": {"tensor_parallel": pairs, "group": dist.group.WORLD},
        "some only": {"tensor_parallel": pairs} if rank < 2 else {},
        "pipelines": {"tensor_parallel": pairs, "pipeline_parallel": pairs},
        "terms": {"tensor_parallel": pairs, "heap_bytes": 1 << 20 + rank // 2},
    }
    return [fault_of(lambda options=options: _init(**options).close()) for options in mistakes.values()]


@pytest.fixture(scope="module")
def messages() -> list[list[tuple[str, str]]]:
    """Of each process, what it says to each mistake."""
    return launch(_wrong, ranks=4)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "tensor_parallel has 3 processes on global rank 0 and 1 on global rank 3; groups of one size"),
        (1, "6 query heads and 2 key/value heads cannot be divided among 4 tensor ranks"),
        (2, "tensor_parallel is a mesh of 2 dimensions; one of them is expected, such as mesh['tp']"),
        (3, "tensor_parallel is a int; a torch.distributed.ProcessGroup, or a DeviceMesh of one dimension"),
        (4, "leave out group"),
        (5, "give them on all ranks"),
        (6, "the pipeline of global ranks [0, 1] has processes of several tensor ranks"),
        (7, "init: global rank 0 has slot_bytes = "),
    ],
)
def test_a_mistake_is_the_same_error_on_all_ranks(
    messages: list[list[tuple[str, str]]], number: int, words: str
) -> None:
    for of_rank in messages:
        kind, message = of_rank[number]
        assert kind == "InvalidArgumentError" and words in message, (kind, message)


def _sizes(order: tuple[str, ...]) -> tuple[Any, ...]:
    mesh = dist.init_device_mesh("cpu", (2,) * 3, mesh_dim_names=order)
    with _init(tensor_parallel=mesh["tp"], pipeline_parallel=mesh["pp"]) as context:
        name = "" if context.global_ranks == [0, 1, 2, 3] else f" (global rank {dist.get_rank()})"
        assert f"rank {context.rank} of 4{name}, shm" in repr(context)
        return context.rank, context.global_ranks, context.stages, context.heads, mesh["tp"].get_local_rank()


@pytest.mark.parametrize(
    ("order", "stride", "stages"),
    [
        (("pp", "dp", "tp"), 1, [[0, 1], [2, 3]]),
        (("dp", "pp", "tp"), 1, [[0, 2], [1, 3]]),
        (("tp", "pp", "dp"), 4, [[0, 1], [2, 3]]),
        (("pp", "tp", "dp"), 2, [[0, 1], [2, 3]]),
    ],
    ids=str,
)
def test_a_context_has_the_processes_with_the_same_tensor_rank(
    order: tuple[str, ...], stride: int, stages: list[list[int]]
) -> None:
    """Its ranks are in the order of the global ranks, whose distance along the tensor dimension is `stride`."""
    for rank, (own, global_ranks, of_stages, heads, tensor_rank) in enumerate(launch(_sizes, order, ranks=8)):
        assert tensor_rank == rank // stride % 2
        assert global_ranks == [other for other in range(8) if other // stride % 2 == tensor_rank]
        assert (global_ranks[own], of_stages, heads) == (rank, stages, distca.Heads(q=2, kv=1, dim=8))


def _pipeline_alone() -> tuple[Any, ...]:
    with _init(pipeline_parallel=_new([3, 0], [2, 1])) as context:
        return context.rank, context.global_ranks, context.stages, context.heads


def test_a_pipeline_without_tensor_parallelism_has_all_processes_and_heads() -> None:
    """`new_group` sorts the ranks."""
    expected = [(rank, [0, 1, 2, 3], [[0, 1], [3, 2]], HEADS) for rank in range(4)]
    assert launch(_pipeline_alone, ranks=4) == expected


@pytest.mark.parametrize(
    ("q", "kv", "tensor_ranks", "expected"),
    [(32, 8, 4, (8, 2)), (32, 4, 8, (4, 1)), (6, 1, 3, (2, 1)), (12, 3, 6, (2, 1)), (5, 5, 1, (5, 5))],
)
def test_heads_are_divided_among_tensor_ranks(q: int, kv: int, tensor_ranks: int, expected: tuple[int, int]) -> None:
    """Key/value heads that are fewer than tensor ranks are copied."""
    heads = distca.Heads(q=q, kv=kv, dim=64, v_dim=32).divided(tensor_ranks)
    assert heads == distca.Heads(*expected, dim=64, v_dim=32)


def _heads_by_window() -> tuple[Any, ...]:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    heads = {None: distca.Heads(8, 2, 16), 5: distca.Heads(4, 1, 32)}
    with _init(tensor_parallel=mesh["tp"], heads=heads) as context:
        return context.layer_heads, context.heads


def test_heads_of_each_window_are_divided_among_tensor_ranks() -> None:
    halves = {None: distca.Heads(4, 1, 16), 5: distca.Heads(2, 1, 32)}
    assert launch(_heads_by_window, ranks=2) == [(halves, halves[5])] * 2


@pytest.mark.parametrize(("q", "kv", "tensor_ranks"), [(6, 2, 4), (6, 3, 2), (6, 2, 3), (4, 4, 0), (4, 4, True)])
def test_heads_that_cannot_be_divided_are_refused(q: int, kv: int, tensor_ranks: int) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="tensor ranks"):
        distca.Heads(q=q, kv=kv, dim=64).divided(tensor_ranks)
