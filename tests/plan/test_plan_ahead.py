"""`PlanAhead`: all ways to learn documents, loaders that end at different steps, errors and early ends."""

import itertools
import os
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import distca
from distca.planner.exchange import Exchange, GatheredSteps
from support.ranks import launch

HEADS = distca.Heads(q=2, kv=1, dim=8)


def _layout(lengths: list[int]) -> distca.Layout:
    return distca.Layout.packed(lengths, ranks=2, tokens_per_rank=8)


def _segments(plan: distca.Plan) -> list[list[tuple[int, int, int]]]:
    return [[tuple(segment) for segment in plan.layout.segments(rank)] for rank in range(plan.layout.num_ranks)]


def test_a_known_layout_gives_each_batch_its_own_plan() -> None:
    batches = [[8, 8], [11, 5], [1, 15]]
    with distca.PlanAhead(batches, heads=HEADS, layout=_layout, rank=1, tolerance=0.1) as steps:
        pairs = list(steps)
        again = list(steps)
    assert [batch for batch, _ in pairs] == batches
    for (batch, plan), (_, repeated) in zip(pairs, again, strict=True):
        expected = distca.plan(_layout(batch), HEADS, rank=1, tolerance=0.1)
        assert plan.rank == 1
        assert plan.digest == repeated.digest == expected.digest


def test_windows_give_each_batch_the_plans_of_all_of_them() -> None:
    batches = [[8, 8], [11, 5]]
    with distca.PlanAhead(batches, heads=HEADS, layout=_layout, rank=1, windows=iter([None, 4])) as steps:
        pairs = list(steps)
    for batch, plans in pairs:
        assert isinstance(plans, distca.Plans)
        assert [(window, plan.digest) for window, plan in plans.items()] == [
            (window, distca.plan(_layout(batch), HEADS, rank=1, window=window).digest) for window in (None, 4)
        ]


def test_exactly_one_step_is_prepared_while_one_is_in_use() -> None:
    asked = threading.Semaphore(0)
    taken: list[int] = []

    def loader() -> Iterator[list[int]]:
        for step in range(4):
            taken.append(step)
            asked.release()
            yield [8, 8]

    with distca.PlanAhead(loader(), heads=HEADS, layout=_layout, rank=0) as steps:
        running = iter(steps)
        next(running)
        asked.acquire()
        assert asked.acquire(timeout=30)  # the second step is prepared although nobody asked for it
        assert not asked.acquire(timeout=0.05)
        assert taken == [0, 1]


def test_errors_of_loader_and_layout_are_raised_by_the_next_iteration() -> None:
    def loader() -> Iterator[list[int]]:
        yield [8, 8]
        raise OSError("the disk is gone")

    with distca.PlanAhead(loader(), heads=HEADS, layout=_layout, rank=0) as steps:
        running = iter(steps)
        assert next(running)[0] == [8, 8]
        with pytest.raises(OSError, match="the disk is gone"):
            next(running)
        with pytest.raises(StopIteration):
            next(running)
    with (
        distca.PlanAhead([[8, 9]], heads=HEADS, layout=_layout, rank=0) as steps,
        pytest.raises(distca.DistcaError),
    ):
        next(iter(steps))


@pytest.mark.parametrize("given", ["layout", "lengths", "transform"])
def test_a_stopiteration_of_a_function_does_not_end_the_pass_as_if_the_loader_had(given: str) -> None:
    def ends(_: object) -> distca.Layout:
        return next(iter(()))

    functions = {"layout": _layout} if given == "transform" else {}
    with (
        distca.PlanAhead([[8, 8]], heads=HEADS, rank=0, **functions, **{given: ends}) as steps,
        pytest.raises(RuntimeError, match="raised StopIteration"),
    ):
        next(iter(steps))


class _Stops(GatheredSteps[None, None]):
    def _load(self) -> tuple[None, list[int] | None]:
        return next(iter(()))

    def _is_last(self, counts: list[int]) -> bool:
        return True

    def _layouts(self, words: list[list[int]], counts: list[int]) -> None:
        raise AssertionError("nothing was told")


def test_a_stopiteration_while_any_steps_load_does_not_end_the_pass() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(_Stops(Exchange(None), "a pass"))


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distca-plan-ahead"]


def test_leaving_early_stops_the_thread() -> None:
    def endless() -> Iterator[list[int]]:
        while True:
            yield [8, 8]

    with distca.PlanAhead(endless(), heads=HEADS, layout=_layout, rank=0) as steps:
        for _ in steps:
            break
    assert not _threads()
    for _ in distca.PlanAhead(endless(), heads=HEADS, layout=_layout, rank=0):
        break
    for thread in _threads():
        thread.join(30)
    assert not _threads()


def test_an_iterator_without_a_name_for_its_owner_gives_all_steps() -> None:
    def ahead() -> distca.PlanAhead[list[int], distca.Plan]:
        return distca.PlanAhead([[8, 8], [11, 5], [1, 15]], heads=HEADS, layout=_layout, rank=0)

    def running() -> Iterator[tuple[list[int] | None, distca.Plan]]:
        return iter(ahead())

    assert [batch for batch, _ in ahead()] == [[8, 8], [11, 5], [1, 15]]
    assert [number for number, _ in enumerate(ahead())] == [0, 1, 2]
    assert len(list(running())) == 3


class _Stateful:
    """A loader that can begin in the middle of its batches."""

    def __init__(self, begin: int) -> None:
        self.next = begin

    def __iter__(self) -> Iterator[list[int]]:
        while self.next < 8:
            self.next += 1
            yield [self.next, 16 - self.next]

    def with_state(self) -> Iterator[tuple[list[int], int]]:
        for batch in self:
            yield batch, self.next


def test_a_state_that_the_loader_yields_beside_the_batch_resumes_after_that_batch() -> None:
    seen, state = [], 0
    while state < 8:  # each run trains 3 steps, writes a checkpoint, and ends
        with distca.PlanAhead(
            _Stateful(state).with_state(), heads=HEADS, layout=lambda loaded: _layout(loaded[0]), rank=0
        ) as steps:
            for loaded, _ in itertools.islice(steps, 3):
                batch, state = loaded
                seen.append(batch)
    assert seen == list(_Stateful(0))


def test_an_iterator_that_another_has_replaced_says_so() -> None:
    with distca.PlanAhead([[8, 8], [11, 5]], heads=HEADS, layout=_layout, rank=0) as steps:
        ended, first = iter(steps), iter(steps)
        with pytest.raises(distca.InvalidArgumentError, match=r"a later iter\(\) began another one"):
            next(ended)
        assert len(list(first)) == 2
        second = iter(steps)
        assert next(first, None) is None  # it had come to its end
        next(second)
    assert next(second, None) is None


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="exactly one"):
        distca.PlanAhead([], heads=HEADS)
    with pytest.raises(distca.InvalidArgumentError, match="exactly one"):
        distca.PlanAhead([], heads=HEADS, layout=_layout, lengths=list)
    with pytest.raises(distca.InvalidArgumentError, match="exactly one"):
        distca.PlanAhead([], heads=HEADS, segments=list, lengths=list)
    for way in ("layout", "segments"):
        with pytest.raises(distca.InvalidArgumentError, match="continues= needs lengths="):
            distca.PlanAhead([], heads=HEADS, continues=bool, **{way: _layout})
    with pytest.raises(distca.InvalidArgumentError, match="bidirectional= needs lengths= or segments="):
        distca.PlanAhead([], heads=HEADS, layout=_layout, bidirectional=list)
    closed = distca.PlanAhead([], heads=HEADS, layout=_layout)
    closed.close()
    closed.close()
    with pytest.raises(distca.InvalidArgumentError, match="closed"):
        iter(closed)


def test_the_rank_is_that_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context's ranks may be other numbers than those of the process group."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    first, second = distca.loopback(2, max_tokens=8, heads=HEADS)
    with first, second, distca.PlanAhead([[3, 4]], heads=HEADS, layout=_layout, context=first) as steps:
        assert [plan.rank for _, plan in steps] == [0]


def test_a_length_that_is_no_integer_is_refused() -> None:
    refused = pytest.raises(distca.InvalidArgumentError, match="length is not an integer")
    with distca.PlanAhead([[3.5]], heads=HEADS, lengths=list) as steps, refused:
        next(iter(steps))


def test_cumulative_lengths_are_called_so() -> None:
    refused = pytest.raises(distca.InvalidArgumentError, match="length 0, must .* look like cumulative lengths")
    with distca.PlanAhead([[0, 5, 9]], heads=HEADS, lengths=list) as steps, refused:
        next(iter(steps))


def test_gathered_lengths_need_no_process_group_for_one_rank() -> None:
    with distca.PlanAhead([[3, 4], [5]], heads=HEADS, lengths=list) as steps:
        assert [(batch, _segments(plan)) for batch, plan in steps] == [
            ([3, 4], [[(0, 0, 3), (1, 0, 4)]]),
            ([5], [[(0, 0, 5)]]),
        ]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (5, r"PlanAhead: segments is 5; a list of \(document, begin, end\) is expected"),
        ([5], r"PlanAhead: a segment is 5; \(document, begin, end\) is expected"),
        ([(0, 4)], r"a segment is \(0, 4\); integers \(document, begin, end\)"),
        ([(0, 0, 4, 1)], r"a segment is \(0, 0, 4, 1\)"),
        ([(-2, 0, 4)], r"a segment is \(-2, 0, 4\)"),
        ([(0, 4, 4)], r"a segment is \(0, 4, 4\); .* 0 <= begin < end"),
        ([(0, -1, 4)], r"a segment is \(0, -1, 4\)"),
        ([(0, 0, 4.0)], r"a segment is \(0, 0, 4.0\)"),
        ([(0, 0, True)], r"a segment is \(0, 0, True\)"),
        ([(0, 0, 2**31 + 1)], "layout: rank 0, segment 0"),
        ([(0, 0, 4), (0, 3, 5)], r"the segments of the ranks: layout: document 0: rows \[3, 4\) are given twice"),
        ([(7, 0, 4), (9, 2, 5)], r"layout: document 1: rows \[0, 2\) are on no rank; in order, .* called \[7, 9\]"),
    ],
)
def test_segments_that_are_none_are_refused_by_the_next_iteration(segments: object, message: str) -> None:
    with (
        distca.PlanAhead([segments], heads=HEADS, segments=lambda batch: batch) as steps,
        pytest.raises(distca.InvalidArgumentError, match=message),
    ):
        next(iter(steps))


def test_segments_may_be_rows_of_a_tensor_with_padding_and_gaps_in_their_numbers() -> None:
    batch = torch.tensor([[9, 3, 5], [-1, 0, 2], [4, 0, 1], [9, 0, 3]])
    with distca.PlanAhead([batch], heads=HEADS, segments=lambda given: given) as steps:
        ((_, plan),) = steps
    assert _segments(plan) == [[(1, 3, 5), (-1, 0, 2), (0, 0, 1), (1, 0, 3)]]


# ---- two ranks; all cases in one launch, each asserted by a test of its own ----


def _unequal_ends(idle_rows: int) -> list[tuple[list[int] | None, list[list[tuple[int, int, int]]], int, str]]:
    batches = [[[3, 4]], [[1], [2, 2], [7]]][dist.get_rank()]
    with distca.PlanAhead(batches, heads=HEADS, lengths=list, idle_rows=idle_rows) as steps:
        return [(batch, _segments(plan), plan.rank, plan.digest) for batch, plan in steps]


def _continued() -> list[list[list[tuple[int, int, int]]]]:
    """Rank 1 has a batch without documents, one that continues those of rank 0, and one that does not."""
    batches = [[[3, 4], [5], [6]], [[], [1, 2], [2]]][dist.get_rank()]
    options = {"heads": HEADS, "lengths": list, "continues": lambda batch: batch == [1, 2]}
    with distca.PlanAhead(batches, **options) as steps:
        return [_segments(plan) for _, plan in steps]


def _cut_by_both(context: int | None) -> list[tuple[list[list[tuple[int, int, int]]], int]]:
    """Each rank loads its rows of head-tail layouts; rank 0 has none of the last one, and its loader ends."""
    rank, layouts = dist.get_rank(), [_head_tail(lengths, context) for lengths in HEAD_TAIL]
    batches = [[(100 - d, begin, end) for d, begin, end in layout.segments(rank)] for layout in layouts]
    if rank == 0:
        assert batches.pop() == []
    with distca.PlanAhead(batches, heads=HEADS, segments=list, idle_rows=2) as steps:
        return [(_segments(plan), plan.rank) for _, plan in steps]


def _bidirectional() -> list[dict[int, list[tuple[int, int]]]]:
    """Rows that see each other, told beside lengths, and beside segments by any rank of a document, or by both."""
    rank, found = dist.get_rank(), []
    lengths = [[[3, 4], [2]], [[5], [1, 6], [7]]][rank]
    ranges = {(3, 4): [(1, 0, 2), (0, 1, 3)], (1, 6): [(1, 2, 5), (1, 0, 2)]}
    with distca.PlanAhead(
        lengths, heads=HEADS, lengths=list, bidirectional=lambda batch: ranges.get(tuple(batch), ())
    ) as steps:
        found += [plan.layout.bidirectional for _, plan in steps]
    last = 2**40  # documents may have any numbers
    segments = [[(7, 0, 4), (last, 0, 5)], [(7, 4, 10)]][rank]
    told = [[(7, 2, 6), (last, 0, 1)], [(7, 2, 6), (7, 8, 10)]][rank]
    with distca.PlanAhead([segments], heads=HEADS, segments=list, bidirectional=lambda _: told) as steps:
        found += [plan.layout.bidirectional for _, plan in steps]
    return found


#: The lengths of each step's documents.
HEAD_TAIL = [[9, 2, 5], [4], [1]]


def _head_tail(lengths: list[int], context: int | None) -> distca.Layout:
    return distca.Layout.head_tail(lengths, ranks=2, longer_than=2, context=context)


def _error_of(iterate) -> tuple[int, str]:
    """The number of steps before the error, and the error itself."""
    num_steps = 0
    try:
        for _ in iterate:
            num_steps += 1
    except Exception as error:
        return num_steps, f"{type(error).__name__}: {error}"
    return num_steps, "no error"


def _failing_loader() -> Iterator[list[int]]:
    yield [2]
    if dist.get_rank() == 0:
        raise OSError("the disk is gone")
    while True:
        yield [3]


def _endless() -> Iterator[list[int]]:
    while True:
        yield [2 + dist.get_rank()]


def _stops_on_rank_1_only() -> tuple[int, str]:
    with distca.PlanAhead(_endless(), heads=HEADS, lengths=list) as steps:
        if dist.get_rank() == 1:
            next(iter(steps))
            return 1, "stopped"
        return _error_of(steps)


def _two_broken_passes() -> list[list[list[tuple[int, int, int]]]]:
    seen = []
    with distca.PlanAhead(_Endless(), heads=HEADS, lengths=list) as steps:
        for _ in range(2):
            for _, plan in steps:
                seen.append(_segments(plan))
                break
    return seen


class _Endless:
    def __iter__(self) -> Iterator[list[int]]:
        return _endless()


def _cases() -> dict[str, object]:
    cases: dict[str, object] = {
        "unequal ends": _unequal_ends(0),
        "idle rows": _unequal_ends(1),
        "two passes": _two_broken_passes(),
        "continued": _continued(),
        "cut by both": _cut_by_both(None),
        "cut by one": _cut_by_both(1),
    }
    with distca.PlanAhead(_failing_loader(), heads=HEADS, lengths=list) as steps:
        cases["failing loader"] = _error_of(steps)
    with distca.PlanAhead([[4], [0] if dist.get_rank() == 1 else [4]], heads=HEADS, lengths=list) as steps:
        cases["wrong length"] = _error_of(steps)
    cases["bidirectional"] = _bidirectional()
    if_first = [(0, 0, 2)] if dist.get_rank() == 0 else [(1, 0, 2)]
    with distca.PlanAhead([[4]], heads=HEADS, lengths=list, bidirectional=lambda _: if_first) as steps:
        cases["rows of no document"] = _error_of(steps)
    told = [[(0, 0, 2)], [(0, 1, 4)]][dist.get_rank()]
    with distca.PlanAhead([told], heads=HEADS, segments=list) as steps:
        cases["rows given twice"] = _error_of(steps)
    with distca.PlanAhead([[]], heads=HEADS, lengths=list, continues=lambda batch: True) as steps:
        cases["continues nothing"] = _error_of(steps)
    cases["one stops"] = _stops_on_rank_1_only()
    cases["threads"] = len(_threads())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    open_files = []
    for _ in range(3):
        with distca.PlanAhead([[4]], heads=HEADS, lengths=list, group=alone) as steps:
            assert len(list(steps)) == 1
        with distca.PlanAhead([[4]], heads=HEADS, lengths=list) as steps:
            assert len(list(steps)) == 1
        open_files.append(len(os.listdir("/proc/self/fd")))
    cases["open files"] = open_files
    return cases


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, object]]:
    return launch(_cases, ranks=2)


def test_loaders_may_end_at_different_steps(two_ranks) -> None:
    layouts = [[[(0, 0, 3), (1, 0, 4)], [(2, 0, 1)]], [[], [(0, 0, 2), (1, 0, 2)]], [[], [(0, 0, 7)]]]
    digests = [step[3] for step in two_ranks[1]["unequal ends"]]
    for rank, batches in enumerate(([[3, 4], None, None], [[1], [2, 2], [7]])):
        expected = list(zip(batches, layouts, [rank] * 3, digests, strict=True))
        assert two_ranks[rank]["unequal ends"] == expected


def test_a_rank_without_a_batch_can_hold_padding(two_ranks) -> None:
    assert [step[1] for step in two_ranks[0]["idle rows"]] == [
        [[(0, 0, 3), (1, 0, 4)], [(2, 0, 1)]],
        [[(-1, 0, 1)], [(0, 0, 2), (1, 0, 2)]],
        [[(-1, 0, 1)], [(0, 0, 7)]],
    ]


def test_a_document_goes_on_on_the_next_rank(two_ranks) -> None:
    for results in two_ranks:
        assert results["continued"] == [
            [[(0, 0, 3), (1, 0, 4)], []],
            [[(0, 0, 5)], [(0, 5, 6), (1, 0, 2)]],
            [[(0, 0, 6)], [(1, 0, 2)]],
        ]


@pytest.mark.parametrize(("case", "context"), [("cut by both", None), ("cut by one", 1)])
def test_documents_may_be_cut_in_any_way(two_ranks, case: str, context: int | None) -> None:
    for rank, results in enumerate(two_ranks):
        steps = results[case]
        assert [seen_from for _, seen_from in steps] == [rank] * len(steps)
        for (found, _), lengths in zip(steps[:2], HEAD_TAIL[:2], strict=True):
            layout, last = _head_tail(lengths, context), len(lengths) - 1  # the ranks count documents down from 100
            assert found == [[(last - d, b, e) for d, b, e in layout.segments(rank)] for rank in range(2)]
        assert steps[2:] == [([[(-1, 0, 2)], [(0, 0, 1)]], rank)]


def test_ranks_tell_which_rows_see_each_other(two_ranks) -> None:
    for results in two_ranks:
        assert results["bidirectional"] == [
            {0: [(1, 3)], 1: [(0, 2)]},
            {2: [(0, 2), (2, 5)]},
            {},
            {0: [(2, 6), (8, 10)], 1: [(0, 1)]},
        ]
        steps, error = results["rows of no document"]
        assert steps == 0
        assert "rank 1 tells bidirectional rows [0, 2) of document 1; [0] are those that it may speak of" in error


def test_rows_that_two_ranks_hold_are_refused_on_both(two_ranks) -> None:
    for results in two_ranks:
        steps, error = results["rows given twice"]
        assert steps == 0
        assert "the segments of the ranks: layout: document 0: rows [1, 2) are given twice (rank 1)" in error


def test_a_batch_without_documents_continues_none(two_ranks) -> None:
    assert "a batch without documents is said to continue one" in two_ranks[1]["continues nothing"][1]


def test_a_pass_can_be_left_early_on_all_ranks_and_another_begun(two_ranks) -> None:
    for results in two_ranks:
        assert results["two passes"] == [[[(0, 0, 2)], [(1, 0, 3)]]] * 2


def test_a_failing_loader_fails_all_ranks_and_names_the_rank(two_ranks) -> None:
    assert two_ranks[0]["failing loader"] == (1, "OSError: the disk is gone")
    steps, error = two_ranks[1]["failing loader"]
    assert (steps, "rank 0 of 2 failed" in error) == (1, True)


def test_a_length_of_zero_is_refused_on_all_ranks(two_ranks) -> None:
    assert "a document has length 0, must be at least 1" in two_ranks[1]["wrong length"][1]
    assert "rank 1 of 2 failed" in two_ranks[0]["wrong length"][1]


def test_a_rank_that_stops_alone_is_named_on_the_others(two_ranks) -> None:
    assert "rank 1 of 2 stopped iterating" in two_ranks[0]["one stops"][1]


def test_a_group_that_is_left_keeps_no_file_open(two_ranks) -> None:
    for results in two_ranks:
        assert len(set(results["open files"][1:])) == 1, results["open files"]


def test_no_thread_is_left(two_ranks) -> None:
    assert [results["threads"] for results in two_ranks] == [0, 0]
