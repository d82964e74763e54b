"""The search for the best set-up, its bounds, the interval of modelled figures, and the verdict."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from distca.errors import InvalidArgumentError
from distca.simulator.bounds import end_seconds, least_memory, least_work, optimistic
from distca.simulator.case import Case
from distca.simulator.reading import read_cluster
from distca.simulator.search import search, set_ups, shared
from distca.simulator.setup import Cluster, Parallelism
from distca.simulator.simulate import StrategyResult, simulate
from distca.simulator.strategies import STRATEGIES
from distca.simulator.validation import Errors, Interval, errors
from distca.simulator.verdict import Verdict, verdict_of
from support.simulated import MODEL as LARGER
from support.simulated import cluster

MODEL = dataclasses.replace(LARGER, layers=2)
SEQUENCES = [[40000, 9536], [20000, 20000, 9536], [4000] * 12 + [1536], [30000, 19536]]
ROOM = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
AMPLE = 1e12
RESULTS = tuple(ROOM / f"simulator{number}.json" for number in ("", "-2", "-3"))


def _cluster(memory: float) -> Cluster:
    made = cluster(4, 2)
    return dataclasses.replace(made, device=dataclasses.replace(made.device, memory=memory))


def _modelled(name: str, memory: float, one_in: int = 1) -> list[tuple[Parallelism, StrategyResult]]:
    """Every set-up of a strategy, or one in so many, modelled one by one."""
    on = _cluster(memory)
    every = set_ups(name, len(SEQUENCES), sum(map(sum, SEQUENCES)), on, MODEL, {})
    return [
        (shape, simulate(shared(SEQUENCES, shape), cluster=on, model=MODEL, parallelism=shape, strategies=[name])[0])
        for shape in itertools.islice(every, 0, None, one_in)
    ]


@pytest.mark.parametrize("memory", [AMPLE, 2.5e9], ids=["ample", "scarce"])
@pytest.mark.parametrize("name", ["unbalanced", "variable-chunks", "all-gather", "distca"])
def test_the_search_finds_the_best_of_all_set_ups_that_fit(name: str, memory: float) -> None:
    every = _modelled(name, memory)
    fitting = [result.seconds for _, result in every if result.fits]
    (found,) = search(SEQUENCES, cluster=_cluster(memory), model=MODEL, strategies=[name])
    assert found.result is not None
    assert found.result.seconds == pytest.approx(min(fitting), rel=1e-12)
    assert found.result.fits and 1 <= found.tried <= len(fitting)
    assert found.tried + found.slower + found.too_large == len(every)
    if memory > 1e11:
        assert len(fitting) == len(every) and found.too_large == 0
    else:
        assert 0 < len(fitting) < len(every) and found.too_large <= len(every) - len(fitting)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_set_up_needs_less_than_its_bounds(name: str) -> None:
    on = _cluster(AMPLE)
    for shape, result in _modelled(name, AMPLE, one_in=3):
        case = Case(shared(SEQUENCES, shape), on, MODEL, shape)
        assert result.memory.total >= least_memory(case, keeps_rows=STRATEGIES[name].keeps_rows)
        assert result.seconds >= least_work(case, optimistic(on)) + end_seconds(case)


def test_bounds_hold_where_rates_depend_on_the_size() -> None:
    on = read_cluster("cpu-2")
    shape = Parallelism(data=2)
    documents = [[[3072], [768] * 4]]
    (result,) = simulate(documents, cluster=on, model=MODEL, parallelism=shape, strategies=["distca"])
    case = Case(documents, on, MODEL, shape)
    assert 0.5 * result.seconds < least_work(case, optimistic(on)) + end_seconds(case) <= result.seconds


def test_sequences_are_dealt_in_order_and_whole() -> None:
    shape = Parallelism(data=2, context=2, micro_batches=2)
    assert shared([[1, 2], [3], [4], [5, 6]], shape) == [[[1, 2], [], [3], []], [[4], [], [5, 6], []]]
    assert shared([[1, 2], [3], [4], [5, 6]], Parallelism(data=2)) == [[[1, 2, 3], [4, 5, 6]]]


def test_what_is_fixed_stays_fixed() -> None:
    on = cluster(8, 8)
    fixed = {"tensor": 2, "micro_batches": 2, "fsdp": False}
    found = list(set_ups("all-gather", 4, 200000, on, MODEL, fixed))
    assert found and all((one.tensor, one.micro_batches, one.fsdp) == (2, 2, False) for one in found)
    assert {one.context for one in found} == {2, 4} and {one.pipeline for one in found} == {1, 2}
    assert {one.context for one in set_ups("unbalanced", 4, 200000, on, MODEL, fixed)} == {1}


def test_documents_are_laid_over_context_ranks_one_after_another() -> None:
    case = Case([[[6, 2], [], [4], []]], cluster(4), MODEL, Parallelism(data=2, context=2))
    (layout,) = STRATEGIES["distca-single"].prepare(case).layouts
    assert [layout.segments(rank) for rank in range(4)] == [
        [(0, 0, 4)],
        [(0, 4, 6), (1, 0, 2)],
        [(2, 0, 2)],
        [(2, 2, 4)],
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategies": ["magic"]}, "strategy 'magic'; allowed are unbalanced"),
        ({"fixed": {"chunks": 2}}, "chunks = 2; not a dimension of the search"),
        ({"sequences": [[], []]}, "there are no documents"),
        ({"sequences": [[4096]] * 3, "fixed": {"data": 4}}, "data 4 can share 3 sequences"),
        ({"cluster": _cluster(1e8)}, "fits into 0 GB a rank: use more ranks"),
    ],
)
def test_a_mistake_is_told(changes: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"sequences": SEQUENCES, "cluster": cluster(4), "strategies": ["unbalanced"], **changes}
    sequences = given.pop("sequences")
    with pytest.raises(InvalidArgumentError, match=message):
        search(sequences, model=MODEL, **given)  # type: ignore[arg-type]


def test_the_errors_are_those_of_the_committed_figures() -> None:
    contents = [json.loads(path.read_text()) for path in RESULTS]
    assert errors() == Errors.of_bench(*contents)
    rows = [{row["name"]: row["value"] for row in content["rows"]} for content in contents]
    assert 100 * errors().unlike == pytest.approx(max(of["steps, largest error"] for of in rows))
    assert 100 * errors().alike == pytest.approx(max(of["balanced / not balanced, largest error"] for of in rows))
    steps = [one for content in contents for one in content["details"]["steps"]]
    slowest = max(one["measured_seconds"] / one["modelled_seconds"] for one in steps)
    assert errors().seconds == pytest.approx(1 - 1 / slowest)


def test_an_interval_has_the_figures_that_were_off_by_the_error() -> None:
    # 10 % too large means 1.1 measured as 1; 10 % too small means 0.9 measured as 1.
    made = Errors(seconds=0.1, unlike=0.2, alike=0.05)
    assert made.of_seconds(0.99) == Interval(pytest.approx(0.9), pytest.approx(1.1))
    assert made.of_ratio(0.96, alike=False) == Interval(pytest.approx(0.8), pytest.approx(1.2))
    assert made.of_ratio(1.05, alike=True).least == pytest.approx(1.0)


def _verdict(sequences: list[list[int]]) -> Verdict:
    names = ["unbalanced", "distca"]
    on, fixed = cluster(4, speed=1e4), {"tensor": 1, "pipeline": 1, "context": 1}
    found = search(sequences, cluster=on, model=MODEL, strategies=names, fixed=fixed)
    made = verdict_of(found, sequences, errors())
    assert made is not None
    return made


def test_equal_documents_and_little_attention_leave_nothing_to_gain() -> None:
    equal = _verdict([[60000]] * 4)
    assert not equal.pays and str(equal).startswith("nothing to gain: all sequences have equal attention")
    little = _verdict([[256] * 16, [512] * 8, [256] * 16, [256] * 16])
    assert not little.pays and str(little).startswith("nothing to gain: attention takes ")


def test_a_reason_why_balance_brings_little_leaves_nothing_to_gain() -> None:
    made = Verdict("distca", "ring", 1.2, Interval(1.1, 1.3), "all sequences have equal attention")
    assert not made.pays and dataclasses.replace(made, reason=None).pays


def test_one_long_document_leaves_something_to_gain() -> None:
    made = _verdict([[60000], *([[1000] * 60] * 3)])
    assert made.pays and made.interval.least > 1.2 and "nothing to gain" not in str(made)


def test_there_is_no_verdict_on_one_side_alone() -> None:
    found = search(SEQUENCES, cluster=cluster(4), model=MODEL, strategies=["unbalanced"])
    assert verdict_of(found, SEQUENCES, errors()) is None
