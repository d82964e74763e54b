"""The released DistCA by its description, and the options of distca: examples by hand, and bytes of real plans."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.simulator.case import Case, Documents
from distca.simulator.setup import Model, Parallelism
from distca.simulator.simulate import simulate
from distca.simulator.strategies import STRATEGIES, distca_paper
from distca.simulator.strategies.distca_paper import Released, fa2_table, items_of, released_layouts
from distca.simulator.strategies.released_planner import Item, cut_documents, released_plan, whole_documents
from distca.simulator.ticking import Ticking, packed
from distca.simulator.work import PieceTimes
from support.simulated import DEVICE, FLAT, MODEL, SHAPES, cluster

HEADS = distca.Heads(q=4, kv=2, dim=8, dtype=torch.bfloat16)
SMALL = Model(layers=1, hidden=64, intermediate=64, vocabulary=10, q_heads=4, kv_heads=2, head_dim=8)


def _released(documents: Documents, memory: float = 1e12) -> Released:
    links = dataclasses.replace(cluster(len(documents[0])), device=dataclasses.replace(FLAT, memory=memory))
    return Released(Case(documents, links, SMALL, Parallelism(data=len(documents[0]))))


def test_rows_leave_from_the_middle_of_a_document_by_hand() -> None:
    # 36 pairs, mean 18. A row from before the middle and its mirror image see 9 keys: two of each are 18 pairs.
    items = released_plan(whole_documents([[8], []]), 2, HEADS, 0.1)
    assert [(item.server, item.pieces, item.pairs) for item in items] == [
        (0, [(0, 2), (6, 8)], 18),
        (1, [(2, 4), (4, 6)], 18),
    ]


def test_the_document_with_fewest_bytes_a_pair_gives_rows_by_hand() -> None:
    # 5,050 and 55 pairs; rank 1 lacks 2,552. Queries and keys have 32 numbers a row. The long document takes
    # (32 x 2,552 / 101 + 32 x 101) / 2,552 = 1.6 numbers a pair, the short one (32 x 55 / 11 + 32 x 11) / 55 = 9.3.
    items = released_plan(whole_documents([[10, 100], []]), 2, HEADS, 0.05)
    assert [(item.document, item.server) for item in items] == [(0, 0), (1, 0), (1, 1)]
    assert items[2].rows == 50 and items[2].pairs == 25 * 101  # 2,552 pairs are 25 rows of 101


def test_a_whole_document_moves_where_all_of_it_is_lacking() -> None:
    items = released_plan(whole_documents([[8, 8], []]), 2, HEADS, 0.0)
    assert [(item.server, item.pieces) for item in items] == [(1, [(0, 8)]), (0, [(0, 8)])]


def test_the_bytes_of_a_move_by_hand() -> None:
    # 4 rows of 4 query heads move, and the keys and values of all 8 rows of 2 heads; 16 bytes a head and row.
    released = _released([[[8], []]])
    items = released_plan(whole_documents([[8], []]), 2, HEADS, 0.1)
    queries, keys, statistics = 4 * 4 * 16, 8 * 2 * 2 * 16, 4 * 4 * 4
    there, back = released.bytes_of(items, "forward")
    assert there[0, 1] == queries + keys == there.sum() and back[1, 0] == queries + statistics == back.sum()
    there, back = released.bytes_of(items, "backward")
    assert there[0, 1] == 3 * queries + keys + statistics and back[1, 0] == queries + keys


def test_the_tolerance_grows_until_the_buffer_holds_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distca_paper, "BUFFER_BYTES", 1)
    roomy, tight = (_released([[[80], [], [], []]], memory) for memory in (1e12, 1.0))
    assert {item.server for item in roomy.items_of(roomy.plan_of(0, 0))} == {0, 1, 2, 3}
    assert [item.server for item in tight.items_of(tight.plan_of(0, 0))] == [0]  # a tolerance of 1.0 moves nothing


def test_the_buffers_of_the_release_hold_its_largest_message() -> None:
    # Backward sends 4 rows of queries, outputs and gradients, 8 rows of keys, and 64 bytes of statistics.
    assert _released([[[8], []]]).slot_bytes == 2 * (3 * 256 + 512 + 64)


lengths = st.lists(st.lists(st.integers(1, 400), max_size=6), min_size=1, max_size=5)


@given(lengths.filter(any), st.sampled_from([0.0, 0.05, 0.3]))
def test_the_released_planner_computes_every_row_once_and_never_adds_to_the_largest_load(
    lengths: list[list[int]], tolerance: float
) -> None:
    items = released_plan(whole_documents(lengths), len(lengths), HEADS, tolerance)
    for number, length in enumerate(n for of in lengths for n in of):
        rows = sorted(row for item in items if item.document == number for b, e in item.pieces for row in range(b, e))
        assert rows == list(range(length))
    before = [sum(n * (n + 1) // 2 for n in of) for of in lengths]
    after = [sum(item.pairs for item in items if item.server == rank) for rank in range(len(lengths))]
    assert sum(after) == sum(before) and max(after) <= max(before)
    mean = sum(before) / len(before)
    assert all(load >= min(was, mean - 401) for load, was in zip(after, before, strict=True))


def test_a_server_of_the_release_begins_when_all_rows_have_come() -> None:
    released = _released([[[80], [8], [], []]])
    plan = released.plan_of(0, 0)
    work = released.attention_of(plan, "forward")
    assert work.at_once.sum() == 0 and (work.later > 0).all()
    pairs = sum(item.pairs for item in released.items_of(plan))
    assert float(work.later.sum()) == pytest.approx(pairs * 4e-9)


def test_flash_attention_2_has_the_rates_of_the_figure() -> None:
    device = dataclasses.replace(DEVICE, attention=fa2_table())
    flop = 4 * 128 * (65536 * 65537 // 2)
    assert PieceTimes(device, "forward", 1).seconds(65536, 65536, causal=True) == pytest.approx(flop / 310e12, rel=0.01)
    flop = 4 * 128 * 64 * 65536
    assert PieceTimes(device, "forward", 1).seconds(64, 65536, causal=False) == pytest.approx(flop / 155e12, rel=0.01)
    backward = PieceTimes(device, "backward", 1).seconds(64, 65536, causal=False)
    assert backward == pytest.approx(2.5 * flop / (155e12 * 581 / 688), rel=0.01)


def test_the_rates_of_flash_attention_2_are_an_option() -> None:
    documents = [[[60000], [1000] * 60]]
    slow, fast = simulate(
        documents,
        cluster=cluster(2, speed=1e4),
        model=MODEL,
        parallelism=Parallelism(data=2),
        strategies=["distca-paper", "distca-paper-fa3"],
    )
    assert slow.seconds > 1.2 * fast.seconds and slow.bytes_inside == fast.bytes_inside


DOCUMENTS = [[[60000], [30000, 30000], [1000] * 60, [20000, 40000]]]


def _moved(name: str) -> float:
    """Bytes of a step's attention."""
    shape = Parallelism(data=4)
    setting = {"cluster": cluster(4), "model": MODEL, "parallelism": shape}
    one, alone = simulate(DOCUMENTS, strategies=[name, "unbalanced"], **setting)
    return one.bytes_inside - alone.bytes_inside


@pytest.mark.parametrize(
    ("name", "options"),
    [("distca", {}), ("distca-rows", {"split_heads": False}), ("distca-retained", {"retain_bytes": 2**40})],
)
def test_the_options_of_distca_are_those_of_its_plans(name: str, options: dict[str, object]) -> None:
    wanted = 0
    for half in distca.halves(distca.Layout.from_documents(DOCUMENTS[0])):
        made = distca.plan(half.layout, MODEL.heads, cost=DEVICE.cost(), ranks_per_node=4, overlap=True, **options)
        wanted += MODEL.layers * sum(made.stats.bytes.values())
    assert _moved(name) == pytest.approx(wanted, abs=1)


def test_heads_and_kept_keys_move_fewer_bytes() -> None:
    both, rows, kept = (_moved(name) for name in ("distca", "distca-rows", "distca-retained"))
    assert kept < both <= rows


def test_kept_keys_take_memory_and_need_no_pipeline() -> None:
    shape = Parallelism(data=4)
    plain, kept = simulate(
        DOCUMENTS, cluster=cluster(4), model=MODEL, parallelism=shape, strategies=["distca", "distca-retained"]
    )
    assert kept.memory.buffers > plain.memory.buffers and kept.fits
    with pytest.raises(distca.InvalidArgumentError, match="distca-retained with pipeline = 2"):
        simulate(
            [DOCUMENTS[0]] * 2,
            cluster=cluster(8, 4),
            model=MODEL,
            parallelism=SHAPES["pipeline"],
            strategies=["distca-retained"],
        )


def test_an_item_of_an_odd_document_by_hand() -> None:
    # Rows 0 to 4; the middle one goes with those before it.
    assert Item(0, 5, 0, 0, 0, 3).pieces == [(0, 5)]
    assert Item(0, 5, 0, 0, 0, 1).pieces == [(0, 1), (4, 5)]
    assert Item(0, 5, 0, 1, 1, 3).pieces == [(1, 3), (3, 4)]


def test_distca_cuts_documents_over_context_ranks_one_after_another() -> None:
    shape = Parallelism(data=2, context=2)
    case = Case([[[10, 4], [], [3], [3]]], cluster(4), MODEL, shape)
    (layout,) = packed(case)
    assert [layout.segments(home) for home in range(4)] == [
        [(0, 0, 7)],
        [(0, 7, 10), (1, 0, 4)],
        [(2, 0, 3)],
        [(3, 0, 3)],
    ]
    # One document on one rank of four: cut, all ranks have a quarter of the rest of a layer as well.
    documents = [[[60000], [], [], []]]
    setting = {"cluster": cluster(4, speed=1e4), "model": MODEL, "strategies": ["distca-single"]}
    (whole,) = simulate(documents, parallelism=Parallelism(data=4), **setting)
    (cut,) = simulate(documents, parallelism=Parallelism(context=4), **setting)
    assert cut.seconds < 0.7 * whole.seconds


def test_homes_with_both_ends_of_long_documents_have_equal_attention_before_anything_moves() -> None:
    # 8 rows over 2 ranks: rows 0, 1, 6, 7 see 1 + 2 + 7 + 8 keys, rows 2 to 5 see 3 + 4 + 5 + 6: 18 each.
    # The mean rows of a rank of the second group are 4: documents of up to 2 are whole.
    shape, documents = Parallelism(data=2, context=2), [[[8], [], [2, 3, 2], [1]]]
    case = Case(documents, cluster(4), SMALL, shape)
    (layout,) = STRATEGIES["distca-head-tail"].prepare(case).layouts
    assert [layout.segments(home) for home in range(4)] == [
        [(0, 0, 2), (0, 6, 8)],
        [(0, 2, 4), (0, 4, 6)],
        [(2, 2, 3), (1, 0, 2), (3, 0, 1)],
        [(2, 0, 1), (2, 1, 2), (3, 1, 2), (4, 0, 1)],
    ]
    # One document over all ranks: but for single rows nothing is uneven, where rows in order may differ by 5 %.
    setting = {"cluster": cluster(4, speed=1e4), "model": MODEL, "parallelism": Parallelism(context=4)}
    names = ["distca-head-tail", "distca"]
    both_ends, in_order = simulate([[[60000], [], [], []]], strategies=names, tolerance=0.05, **setting)
    assert both_ends.idle_by_cause.uneven < 0.003 < 0.01 < in_order.idle_by_cause.uneven


def test_spread_homes_are_those_of_each_context_parallel_group_by_hand() -> None:
    # The long documents are for 2 * 512 / 544 and 2 * 216 / 218 ranks, both rounded up to 2. Their rows fill 1 rank of
    # the first group, and 1.5 of the second, of which 2 is less than 1.5 times as many.
    shape, documents = Parallelism(data=2, context=2), [[[8, 2], [2, 2, 2], [6, 1], [1]]]
    (layout,) = STRATEGIES["distca-spread"].prepare(Case(documents, cluster(4), SMALL, shape)).layouts
    assert [layout.segments(home) for home in range(4)] == [
        [(0, 0, 2), (0, 6, 8), (1, 0, 2), (2, 0, 2)],
        [(0, 2, 4), (0, 4, 6), (3, 0, 2), (4, 0, 2)],
        [(5, 0, 4)],
        [(5, 4, 6), (6, 0, 1), (7, 0, 1)],
    ]


def test_spread_homes_have_plans_of_a_single_stream_whose_contributions_to_key_gradients_are_small() -> None:
    lengths = [60000, 20000, *[1000] * 60]
    case = Case([[lengths, [], [], []]], cluster(4), MODEL, Parallelism(context=4))
    program = STRATEGIES["distca-spread"].prepare(case)
    assert isinstance(program, Ticking) and program.plans.parts == (None,)
    plan, layout = program.plan_of(0, None), distca.Layout.spread(lengths, ranks=4)
    options = {"cost": DEVICE.cost(), "ranks_per_node": 4}
    wanted = distca.plan(layout, MODEL.heads, reduce_dtype=torch.bfloat16, **options)
    assert plan.tasks == wanted.tasks and plan.stats.bytes == wanted.stats.bytes
    assert {task.round for task in plan.tasks} > {0, 1}
    in_fp32 = distca.plan(layout, MODEL.heads, **options)
    assert sum(plan.stats.bytes.values()) < sum(in_fp32.stats.bytes.values())


def test_the_release_cuts_documents_from_both_ends_by_hand() -> None:
    # 16 rows, 8 a rank: the first 4 and the last 4 of 12, then the 4 in the middle and the short document.
    items = cut_documents([12, 4], 2)
    assert [(item.home, item.pieces) for item in items] == [
        (0, [(0, 4), (8, 12)]),
        (1, [(4, 6), (6, 8)]),
        (1, [(0, 4)]),
    ]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.sampled_from([2, 4]))
def test_a_cut_of_the_release_has_every_row_once_and_equal_tokens(lengths: list[int], ranks: int) -> None:
    shape = Parallelism(context=ranks)
    case = Case([[lengths, *[[]] * (ranks - 1)]], cluster(ranks), SMALL, shape)
    (layout,) = released_layouts(case)  # a layout has every row once
    assert layout.document_lengths == lengths
    rows = [layout.num_rows(rank) for rank in range(ranks)]
    assert max(rows) <= sum(lengths) / ranks + len(lengths) + ranks
    assert sorted(items_of(layout), key=str) == sorted(cut_documents(lengths, ranks), key=str)


def test_the_bytes_of_a_cut_document_by_hand() -> None:
    # 8 rows on two ranks, 18 pairs each: rank 0 has rows 0, 1, 6, 7 and rank 1 the others. Nothing moves, but each
    # gets the keys and values of the other's 4 rows, and sends their gradients back.
    links = dataclasses.replace(cluster(2), device=FLAT)
    released = Released(Case([[[8], []]], links, SMALL, Parallelism(context=2)))
    items = cut_documents([8], 2)
    keys = 4 * 2 * 2 * 16
    there, back = released.bytes_of(items, "forward")
    assert there.tolist() == [[0, keys], [keys, 0]] and back.sum() == 0
    there, back = released.bytes_of(items, "backward")
    assert there.tolist() == [[0, keys], [keys, 0]] and back.tolist() == [[0, keys], [keys, 0]]
    assert released_plan(items, 2, HEADS, 0.05) == items
