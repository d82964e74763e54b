"""`PipelinePlansAhead`: lengths that one stage tells to all, iterations that end together, errors that all are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist

import distca
from distca.pipeline import PipelinePlans, PipelinePlansAhead, plans_ahead
from support.ranks import launch

HEADS = distca.Heads(q=2, kv=1, dim=8)
STAGES = [[0, 1], [2, 3]]
#: [rank of a stage][micro-batch]: the documents of five micro-batches; rank 1 has none in the second.
DOCUMENTS = [[[30, 4], [50], [9, 9, 9], [70], [1]], [[20], [], [60, 5], [8], [2, 2]]]


def _digests(plans: PipelinePlans) -> list[str]:
    return [plans.plan(tick, 0).digest for tick in range(len(plans.table))]


def _expected(first: int, microbatches: int = 2, stages: Sequence[Sequence[int]] = STAGES, **options: Any) -> list[str]:
    """The digests of the plans of that many micro-batches from `first` on."""
    layouts = [
        distca.Layout.from_documents([of_rank[n] for of_rank in DOCUMENTS[: len(stages[0])]])
        for n in range(first, first + microbatches)
    ]
    return _digests(PipelinePlans(layouts, HEADS, stages=stages, **options))


def test_the_next_plans_are_made_while_an_iteration_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Therefore a step that takes longer than planning never waits for plans."""
    made, threads = threading.Semaphore(0), []

    def make(*arguments: Any, **options: Any) -> PipelinePlans:
        plans = PipelinePlans(*arguments, **options)
        threads.append(threading.current_thread().name)
        made.release()
        return plans

    monkeypatch.setattr(plans_ahead, "PipelinePlans", make)
    batches = [[n] for n in range(1, 9)]
    with PipelinePlansAhead(batches, heads=HEADS, stages=[[0]], lengths=list, microbatches=2) as iterations:
        running = iter(iterations)
        assert next(running)[0] == [[1], [2]]
        made.acquire()
        assert made.acquire(timeout=30)  # the second plans are made although nobody asked for them
        assert not made.acquire(timeout=0.05)
        assert next(running)[0] == [[3], [4]]
    assert set(threads) == {"distca-plan-ahead"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches = 0; a positive integer"),
        ({"loading_stage": 1}, "loading_stage = 1; 0 to 0 are allowed"),
        ({"stages": [[0, 1]]}, "the stages have 2 ranks, and 1 ranks of the group tell for them"),
        ({"tellers": [1]}, r"rank = 0, tellers = \[1\]; 0 to 0 and 0 to 0 are allowed"),
        ({"rank": 1}, r"rank = 1, tellers = \[0\]; 0 to 0 and 0 to 0 are allowed"),
        ({"lengths": None}, "give exactly one of lengths= and segments="),
        ({"segments": list}, "give exactly one of lengths= and segments="),
        ({"lengths": None, "segments": list, "continues": bool}, "continues= needs lengths=; segments say it"),
        ({"stages": [[1]]}, "PipelinePlansAhead: stages = .*each rank from 0 on once"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"heads": HEADS, "stages": [[0]], "lengths": list, "microbatches": 2} | options
    with pytest.raises(distca.InvalidArgumentError, match=message):
        PipelinePlansAhead([[3], [4]], **arguments)


def test_a_closed_one_cannot_be_used_again() -> None:
    ahead = PipelinePlansAhead([[3]], heads=HEADS, stages=[[0]], lengths=list, microbatches=1)
    ahead.close()
    with pytest.raises(distca.InvalidArgumentError, match="PipelinePlansAhead: it was closed"):
        iter(ahead)


def test_errors_of_planning_are_raised_by_the_next_iteration() -> None:
    with (
        PipelinePlansAhead([[3]], heads=HEADS, stages=[[0]], lengths=list, microbatches=1, layers=0) as iterations,
        pytest.raises(distca.InvalidArgumentError, match="layers = 0"),
    ):
        next(iter(iterations))


# ---- four ranks, two stages of two; all cases in one launch, each asserted by a test of its own ----

_Seen = tuple[list[tuple[Any, list[str], int]], str]


def _seen(loader: Any, **options: Any) -> _Seen:
    """What a rank gets: the batches, the plans' digests and rank of each iteration; and how the pass ended."""
    arguments: dict[str, Any] = {"heads": HEADS, "stages": STAGES, "lengths": list, "microbatches": 2} | options
    seen: list[tuple[Any, list[str], int]] = []
    with PipelinePlansAhead(loader, **arguments) as iterations:
        try:
            for batches, plans in iterations:
                seen.append((batches, _digests(plans), plans.rank))
        except distca.DistcaError as error:
            return seen, f"{type(error).__name__}: {error}"
        except OSError as error:
            return seen, f"OSError: {error}"
    return seen, "ended"


def _failing(batches: list[Any]) -> Iterator[Any]:
    yield from batches[:3]
    raise OSError("the disk is gone")


def _endless() -> Iterator[list[int]]:
    while True:
        yield [5]


def _stops_on_rank_3_only(mine: Any) -> _Seen | str:
    loader = None if mine is None else _endless()
    if dist.get_rank() != 3:
        return _seen(loader)
    with PipelinePlansAhead(loader, heads=HEADS, stages=STAGES, lengths=list, microbatches=2) as iterations:
        next(iter(iterations))
    return "stopped"


def _two_passes(mine: Any) -> list[list[str]]:
    """Each pass is left after its first iteration."""
    seen = []
    with PipelinePlansAhead(mine, heads=HEADS, stages=STAGES, lengths=list, microbatches=2) as iterations:
        for _ in range(2):
            for _, plans in iterations:
                seen.append(_digests(plans))
                break
    return seen


#: The documents of two micro-batches, cut head-tail over the ranks of a stage.
CUT = [[40, 3], [12]]


def _head_tail(lengths: list[int]) -> distca.Layout:
    return distca.Layout.head_tail(lengths, ranks=2, longer_than=8)


def _segments(micro_batches: list[list[int]], index: int) -> list[list[tuple[int, int, int]]]:
    return [_head_tail(lengths).segments(index) for lengths in micro_batches]


def _cases() -> dict[str, Any]:
    rank = dist.get_rank()
    stage, index = divmod(rank, 2)
    documents = DOCUMENTS[index]
    first = documents if stage == 0 else None
    changed = [[8, 8], *documents[1:]] if rank == 3 else documents
    cases = {
        "first stage loads": _seen(first),
        "all load": _seen(documents),
        "last stage loads": _seen(documents if stage == 1 else None, loading_stage=1),
        "other documents": _seen(changed),
        "ends early": _seen(None if stage else documents[:3] if rank == 1 else documents),
        "labels end early": _seen(documents[:3] if rank == 2 else documents),
        "fails": _seen(_failing(documents) if rank == 0 else first),
        "labels fail": _seen(_failing(documents) if rank == 3 else documents),
        "wrong length": _seen([[0], [1]] if rank == 1 else first),
        "no loader": _seen(None if rank == 1 else first),
        "another number": _seen(first, microbatches=3 if rank == 2 else 2),
        "continued": _seen(first, continues=lambda lengths: lengths is DOCUMENTS[1][0]),
        "continued from none": _seen(first, continues=lambda lengths: lengths is DOCUMENTS[0][0]),
        "segments": _seen(_segments(CUT, index) if stage == 0 else None, lengths=None, segments=list),
        "other segments": _seen(_segments(CUT[::-1] if rank == 2 else CUT, index), lengths=None, segments=list),
        "tensor ranks": _seen(
            documents if rank == 2 else None, stages=[[0], [1]], tellers=[0, 2], rank=stage, loading_stage=1
        ),
        "evaluation": _seen(first, backward=False, layers=[1, 2], in_flight=1),
        "one stops": _stops_on_rank_3_only(first),
        "two passes": _two_passes(first),
    }
    cases["threads"] = [thread.name for thread in threading.enumerate() if thread.name == "distca-plan-ahead"]
    return cases


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return launch(_cases, ranks=4)


def _iterations(rank: int, *, loads: bool, number: int = 2, **options: Any) -> list[tuple[Any, list[str], int]]:
    documents = DOCUMENTS[rank % 2]
    return [
        (documents[first : first + 2] if loads else None, _expected(first, **options), rank)
        for first in range(0, 2 * number, 2)
    ]


def test_all_ranks_plan_what_one_stage_loads_and_drop_an_incomplete_iteration(four_ranks) -> None:
    for rank, cases in enumerate(four_ranks):
        assert cases["first stage loads"] == (_iterations(rank, loads=rank < 2), "ended")
        assert cases["last stage loads"] == (_iterations(rank, loads=rank >= 2), "ended")
        assert cases["two passes"] == [_expected(0)] * 2


def test_other_stages_may_load_the_same_documents(four_ranks) -> None:
    for rank, cases in enumerate(four_ranks):
        assert cases["all load"] == (_iterations(rank, loads=True), "ended")


def test_a_document_goes_on_on_the_next_rank(four_ranks) -> None:
    layouts = [
        distca.Layout([[(0, 0, 30), (1, 0, 4)], [(1, 4, 24)]]),
        distca.Layout.from_documents([DOCUMENTS[0][1], DOCUMENTS[1][1]]),
    ]
    expected = _digests(PipelinePlans(layouts, HEADS, stages=STAGES))
    assert expected != _expected(0)
    for cases in four_ranks:
        (_, first, _), (_, second, _) = cases["continued"][0]
        assert (first, second) == (expected, _expected(2))


def test_documents_may_be_cut_in_any_way(four_ranks) -> None:
    expected = _digests(PipelinePlans([_head_tail(lengths) for lengths in CUT], HEADS, stages=STAGES))
    for rank, cases in enumerate(four_ranks):
        (batches, digests, seen_from), *others = cases["segments"][0]
        assert (digests, seen_from, others, cases["segments"][1]) == (expected, rank, [], "ended")
        assert batches == (_segments(CUT, rank) if rank < 2 else None)


def test_other_segments_than_those_that_were_told_are_refused(four_ranks) -> None:
    seen, error = four_ranks[2]["other segments"]
    assert seen == []
    assert "rank 2 loaded segments [(0, 0, 3), (0, 9, 12)] for micro-batch 0, and rank 0 of the loading" in error
    assert "stage segments [(0, 0, 10), (0, 30, 40)" in error
    for rank in (0, 1, 3):
        assert "rank 2 of 4 failed" in four_ranks[rank]["other segments"][1]


def test_the_first_rank_continues_no_document(four_ranks) -> None:
    for cases in four_ranks:
        seen, error = cases["continued from none"]
        assert (
            "the first document of rank 0 is said to continue that of the rank before"
            in cases["continued from none"][1]
        )


def test_the_first_rank_of_each_tensor_group_tells(four_ranks) -> None:
    """Ranks 0 and 1 are a tensor group, and ranks 2 and 3, of the stage that loads."""
    for rank, cases in enumerate(four_ranks):
        seen = [
            (DOCUMENTS[0][first : first + 2] if rank == 2 else None, _expected(first, stages=[[0], [1]]), rank // 2)
            for first in (0, 2)
        ]
        assert cases["tensor ranks"] == (seen, "ended")


def test_other_documents_than_those_that_were_told_are_refused(four_ranks) -> None:
    message = (
        "rank 3 loaded documents of [8, 8] rows for micro-batch 0, and rank 1 of the loading stage documents of [20] "
        "rows; they must be the same"
    )
    seen, error = four_ranks[3]["other documents"]
    assert seen == [] and error.startswith("InvalidArgumentError") and message in error
    for cases in four_ranks[:3]:
        assert "PeerLeftError" in cases["other documents"][1] and "rank 3 of 4 failed" in cases["other documents"][1]


@pytest.mark.parametrize("case", ["ends early", "labels end early"])
def test_all_ranks_end_with_the_first_loader(four_ranks, case: str) -> None:
    for rank, cases in enumerate(four_ranks):
        loads = rank < 2 or case == "labels end early"
        assert cases[case] == (_iterations(rank, loads=loads, number=1), "ended")


@pytest.mark.parametrize(
    ("case", "failing", "message"),
    [
        ("fails", 0, "OSError: the disk is gone"),
        ("labels fail", 3, "OSError: the disk is gone"),
        ("wrong length", 1, "a document has length 0, must be at least 1"),
        ("no loader", 1, "rank 1 has no loader; each of the ranks [0, 1], of the loading stage, needs one"),
        ("another number", 2, "rank 0 loads 2 micro-batches for an iteration, rank 2 expects 3"),
    ],
)
def test_an_error_on_one_rank_is_told_on_all(four_ranks, case: str, failing: int, message: str) -> None:
    assert message in four_ranks[failing][case][1]
    for rank, cases in enumerate(four_ranks):
        seen, error = cases[case]
        assert rank == failing or f"PeerLeftError: PipelinePlansAhead: rank {failing} of 4 failed" in error
        assert len(seen) == (1 if case.endswith("fail") or case == "fails" else len(seen))


def test_evaluation_has_plans_of_forward_ticks_alone(four_ranks) -> None:
    for rank, cases in enumerate(four_ranks):
        options = {"backward": False, "layers": [1, 2], "in_flight": 1}
        assert cases["evaluation"] == (_iterations(rank, loads=rank < 2, **options), "ended")
        assert len(cases["evaluation"][0][0][1]) == 3  # ticks of two micro-batches in two stages


def test_a_rank_that_stops_alone_is_named_on_the_others(four_ranks) -> None:
    assert [cases["one stops"] for cases in four_ranks[3:]] == ["stopped"]
    for cases in four_ranks[:3]:
        assert "rank 3 of 4 stopped iterating" in cases["one stops"][1]


def test_no_thread_is_left(four_ranks) -> None:
    assert [cases["threads"] for cases in four_ranks] == [[]] * 4


# ---- three stages of one rank ----


def _three_stages() -> _Seen:
    stages = [[2], [0], [1]]
    return _seen(DOCUMENTS[0] if dist.get_rank() == 2 else None, stages=stages, microbatches=1, tolerance=0.1)


def test_three_stages_of_a_rank_each_get_five_iterations() -> None:
    for rank, (seen, end) in enumerate(launch(_three_stages, ranks=3)):
        assert end == "ended" and [batches for batches, _, _ in seen] == [
            [lengths] if rank == 2 else None for lengths in DOCUMENTS[0]
        ]
        for first, (_, digests, of_rank) in enumerate(seen):
            assert of_rank == rank
            assert digests == _expected(first, 1, stages=[[2], [0], [1]], tolerance=0.1)
