"""The memory of an iteration, with rows and bytes that were counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distca
from distca.pipeline import PipelineMemory, PipelinePlans, smallest_slots

HEADS = distca.Heads(q=2, kv=1, dim=8)
#: Bytes of a row that core attention keeps: q, k, v and out are 6 heads of 8 numbers of 4 bytes; lse has 2 numbers.
ATTENTION, RESULTS = 6 * 8 * 4 + 2 * 4, 2 * 8 * 4 + 2 * 4


def _memory(rows: tuple[int, ...] = (100, 40, 10), layers: int = 2, **options: Any) -> PipelineMemory:
    """Of two stages of a rank each, and micro-batches of so many rows.

    The table of three micro-batches is ``F0 F1 . F2 B0 . B1 B2`` over ``. F0 B0 F1 B1 F2 B2 .``.
    """
    of_plans = {name: options.pop(name) for name in ("backward", "in_flight", "chunks") if name in options}
    layouts = [distca.Layout.from_documents([[n]]) for n in rows]
    plans = PipelinePlans(layouts, HEADS, stages=[[0], [1]], layers=layers, **of_plans)
    return plans.memory(layer_bytes=1000, hidden_bytes=10, **options)


def test_rows_in_flight_are_those_of_the_micro_batches_that_are_held() -> None:
    """1F1B holds two micro-batches on the first stage: 0 and 1, then 1 and 2."""
    memory = _memory()
    assert [(rank.chunks, rank.rows, rank.rows_1f1b) for rank in memory.ranks] == [(3, 150, 140), (1, 100, 100)]
    memory = _memory((10, 40, 100))
    assert [(rank.rows, rank.rows_1f1b) for rank in memory.ranks] == [(150, 140), (100, 100)]
    assert [rank.rows for rank in _memory((40, 10, 100, 20)).ranks] == [150, 100]  # 0 to 2; then 1 to 3 are 130
    assert [rank.rows for rank in _memory(in_flight=2).ranks] == [140, 100]
    assert [rank.rows for rank in _memory(in_flight=1).ranks] == [100, 100]


def test_interleaved_chunks_count_each() -> None:
    """Of two chunks the first stage holds min(4, 3 * 2 - 1) = 4 works: both chunks of both micro-batches."""
    first, last = _memory((100, 40), chunks=2).ranks
    assert (first.chunks, first.rows, first.rows_1f1b) == (4, 280, 280)
    assert (last.chunks, last.rows) == (3, 240)  # two first chunks, and the last one of micro-batch 0


def test_without_recomputation_all_layers_keep_their_rows() -> None:
    """In tick 3 the first stage also has a gradient of 100 rows; in tick 2 the last has an input of 40 rows."""
    first, last = _memory().ranks
    outputs = 150 * 10  # not yet freed, for their backward
    assert (first.activations, first.attention) == (150 * 2 * 1000 + outputs + 100 * 10, 150 * 2 * ATTENTION)
    assert (last.activations, last.attention) == (100 * 2 * 1000 + 40 * 10, 100 * 2 * ATTENTION)


def test_with_recomputation_inputs_are_kept_and_one_group_is_run_again() -> None:
    """The most is held in the backward ticks of micro-batch 0: 4 on the first stage, 2 on the last one."""
    first, last = _memory(recompute="layer").ranks
    assert (first.activations, first.attention) == (150 * 2 * 10 + 100 * 1000 + 150 * 10, 100 * ATTENTION)
    assert (last.activations, last.attention) == (100 * 2 * 10 + 100 * 1000 + 40 * 10, 100 * ATTENTION)
    first, _ = _memory(recompute="stage").ranks
    assert (first.activations, first.attention) == (150 * 10 + 100 * 2000 + 150 * 10, 100 * 2 * ATTENTION)
    first, _ = _memory(layers=3, recompute=(2, 1)).ranks
    assert (first.activations, first.attention) == (150 * 2 * 10 + 100 * 2000 + 150 * 10, 100 * 2 * ATTENTION)
    first, _ = _memory(layers=3, recompute=(1, 0, 0)).ranks
    kept = 150 * (10 + 2 * 1000)
    assert (first.activations, first.attention) == (kept + 100 * 1000 + 150 * 10, (150 * 2 + 100) * ATTENTION)


def test_saved_attention_keeps_out_and_lse_of_all_layers() -> None:
    first, _ = _memory(recompute="layer", save_attention=True).ranks
    assert first.attention == 150 * 2 * RESULTS + 100 * (ATTENTION - RESULTS)


def test_evaluation_keeps_nothing() -> None:
    for rank in _memory(backward=False).ranks:
        assert (rank.chunks, rank.rows, rank.rows_1f1b, rank.activations, rank.attention) == (0, 0, 0, 0, 0)


def test_core_attention_keeps_as_many_bytes_as_the_table_says() -> None:
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with distca.loopback(1, max_tokens=50, heads=HEADS)[0] as context:
        plan = distca.plan(distca.Layout.from_documents([[50]]), HEADS, context=context)
        q, k, v = (torch.randn(50, heads, 8, requires_grad=True) for heads in (2, 1, 1))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = distca.core_attention(q, k, v, plan, context=context)
        out.sum().backward()
    assert sum(kept.values()) - plan.tensor.nbytes == 50 * ATTENTION


def test_ranks_stand_in_the_order_of_the_context() -> None:
    layouts = [distca.Layout.from_documents([[300], [100]])] * 2
    memory = PipelinePlans(layouts, HEADS, stages=[[2, 0], [1, 3]]).memory(layer_bytes=1)
    assert [(rank.stage, rank.rows) for rank in memory.ranks] == [(0, 200), (1, 300), (0, 600), (1, 100)]


def _plans(**options: Any) -> PipelinePlans:
    lengths = [[[900, 100], [500, 500]], [[100] * 10, [990, 10]], [[1000], [250] * 4], [[600, 400], [20] * 50]]
    layouts = [distca.Layout.from_documents(of_ranks) for of_ranks in lengths]
    return PipelinePlans(layouts, HEADS, stages=[[0, 1], [2, 3]], tolerance=0.02, min_rows=8, **options)


def test_arenas_are_the_largest_of_all_ticks() -> None:
    plans = _plans(layers=2, windows=[None, 64] * 2)
    memory = plans.memory()
    arenas = [
        max(
            arenas[rank].total
            for tick in range(len(plans.table))
            for step in range(2)
            for arenas in plans.plan(tick, step).stats.arena_bytes.values()
        )
        for rank in range(4)
    ]
    assert [rank.arena for rank in memory.ranks] == arenas
    assert memory.slot_bytes == max(arenas) and memory.heap_bytes == 2 * max(arenas)
    assert memory.imbalance("arena") == pytest.approx(max(arenas) / (sum(arenas) / 4))
    assert memory.totals == [memory.heap_bytes + rank.attention for rank in memory.ranks]


def test_smallest_slots_take_the_balance_that_they_may() -> None:
    unlimited = _plans()
    found = smallest_slots(_plans, imbalance=1.1)
    assert found.stats.slot_bytes < 0.9 * unlimited.stats.slot_bytes
    assert unlimited.stats.imbalance_after < found.stats.imbalance_after <= 1.1
    assert found.stats.slot_bytes == max(found.plan(tick, 0).stats.slot_bytes for tick in range(len(found.table)))
    assert smallest_slots(_plans, imbalance=1.0).stats.slot_bytes == unlimited.stats.slot_bytes
    with pytest.raises(distca.InvalidArgumentError, match=r"imbalance = 0.9; at least 1"):
        smallest_slots(_plans, imbalance=0.9)


def test_the_table_is_readable() -> None:
    lines = str(_memory()).splitlines()
    assert lines[0].split() == ["rank", "stage", "chunks", "rows", "rows", "(1F1B)", *_COLUMNS]
    assert lines[1].split()[:5] == ["0", "0", "3", "150", "140"]
    assert lines[3].split()[:4] == ["largest", "3", "150", "140"]
    assert lines[4].split()[:4] == ["mean", "2", "125", "120"]
    assert lines[5].split()[:6] == ["largest", "/", "mean", "1.50", "1.20", "1.17"]
    assert lines[6].startswith("8 ticks;") and lines[6].endswith("no keys are retained")


_COLUMNS = ("arena", "activations", "attention", "total")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "all"}, "PipelinePlans.memory: recompute = 'all'"),
        ({"recompute": (1, 2)}, "sizes that sum up to 2 layers"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(distca.InvalidArgumentError) as refused:
        _memory(**options)
    assert message in str(refused.value)


def test_wrong_bytes_and_columns_are_refused() -> None:
    plans = _plans()
    with pytest.raises(distca.InvalidArgumentError, match=r"hidden_bytes = 1.5; a number of bytes"):
        plans.memory(hidden_bytes=1.5)
    with pytest.raises(distca.InvalidArgumentError, match=r"column = 'arenas'; stage, chunks, rows, .*, total are"):
        plans.memory().imbalance("arenas")
