"""Runs the checks of `distca verify`, and judges what ranks have returned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from distca.apps.common.ranks import start_ranks
from distca.apps.verify.cases import Case, all_features, all_shapes, between_ranks, random_inputs
from distca.apps.verify.ranks import LOCAL, Returned, Rows, UnavailableError, Where, results_of_rank, rows_of_rank
from distca.apps.verify.reference import exact, largest_logits, rounded
from distca.connect.launch import RankError
from distca.heads import DTYPES, Heads
from distca.planner.layout import Layout

#: The names of results.
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
#: How large errors may be, in those of the same formula with the roundings that a fused kernel cannot avoid: the root
#: of the mean square, and the largest one.
MOST_RMS, MOST_LARGEST = 1.25, 2.5
#: The former for ATen's flash attention, where each task's part of dk and dv is rounded before the parts are added.
MOST_RMS_OF_FLASH = 1.5
#: How far lse may be off because kernels make exponentials no better than the inputs' dtype can show, in units of that
#: dtype's rounding of a weight.
LSE_UNITS = 2.0**-8
#: How far the gradient of a sink may be off, in roundings of the root of the sum of its terms' squares.
SUM_UNITS = 16
#: How far the largest logits may be off, as a fraction of the largest one: products are summed up in fp32, and a GPU's
#: hyperbolic tangent of a softcap is no exact one.
LOGIT_ERROR = 2.0**-14
_UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Check:
    """A problem that was computed, and how that ended.

    Attributes:
        where: what computed it, and the inputs' dtype.
        problem: what it was about; empty if this is about all problems of `where`.
        passed: whether all is right; None if this was not computed, because it is not available here.
        wrong: what is wrong, or why this was not computed.
        errors: for each result the largest error as a fraction of the allowed one.
    """

    where: str
    problem: str
    passed: bool | None
    wrong: str = ""
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """What to check.

    Attributes:
        device: "cpu" or "cuda".
        attentions: what computes: the CPU's kernel, or "own" and "flash" on a GPU.
        transports: how rows travel between ranks.
        ranks: the number of ranks that exchange rows.
        dtypes: of the inputs.
        heads: these heads alone, in all dtypes; None for those of `all_shapes` and 4 query heads of 64 or 128.
        seed: of the inputs, layouts and plans.
        timeout: seconds after which a rank that does not answer is a fault.
    """

    device: str
    attentions: Sequence[str]
    transports: Sequence[str]
    ranks: int
    dtypes: Sequence[torch.dtype]
    heads: Heads | None
    seed: int
    timeout: float


def checks(scope: Scope) -> Iterator[Check]:
    """Does the checks one after the other. Those of the same `Check.where` follow each other."""
    cases: list[Case] = []
    between: list[list[Case]] = []  # by dtype
    for dtype in scope.dtypes:
        narrow, wide = (Heads(4, 2, dim, dtype=dtype) for dim in (64, 128))
        if scope.heads is not None:
            narrow = wide = replace(scope.heads, dtype=dtype)
        else:
            cases += [*all_shapes(dtype), *all_features(wide)]
        cases += all_features(narrow)
        between.append(between_ranks(narrow))
    judge = _Judge(scope.seed)
    for attention in scope.attentions:
        yield from _of_attention(scope, attention, cases, between, judge)


class _Judge:
    """Judges results, with a reference that is made once for each case."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._references: dict[Case, Reference] = {}

    def judged(self, where: Where, case: Case, of_ranks: list[Returned], alone: Returned | None) -> Check:
        """The check of what ranks returned; `alone` is what one rank returned, if it was not that one."""
        same = replace(case, name="", retain_bytes=0, reduce_dtype=torch.float32)
        if same not in self._references:
            self._references[same] = Reference(same, self._seed)
        return _judged(where, case, of_ranks, alone, self._references[same], self._seed)


def _of_attention(
    scope: Scope, attention: str, cases: list[Case], between: list[list[Case]], judge: _Judge
) -> Iterator[Check]:
    one_rank = Where(scope.device, attention, "loopback", 1)
    all_cases = [*cases, *itertools.chain.from_iterable(between)]
    try:
        (alone,) = _run(one_rank, all_cases, scope)
    except RankError as error:
        yield _failed(one_rank, error)
        return
    for case, returned in zip(cases, alone, strict=False):
        yield judge.judged(one_rank, case, [returned], None)
    expected = dict(zip(all_cases, alone, strict=True))

    def of_ranks(where: Where, cases: list[Case]) -> Iterator[Check]:
        try:
            returned_by = _run(where, cases, scope)
        except RankError as error:
            yield _failed(where, error)
            return
        for i, case in enumerate(cases):
            yield judge.judged(where, case, [returned[i] for returned in returned_by], expected[case])

    heads = {case.heads for of_dtype in between for case in of_dtype}
    local = [case for case in cases if case.heads in heads and not case.bidirectional and not case.branches]
    yield from of_ranks(replace(one_rank, transport=LOCAL), local)
    for transport in scope.transports:
        for of_dtype in between:  # in processes of their own: no transport has to begin twice in one
            yield from of_ranks(replace(one_rank, transport=transport, ranks=scope.ranks), of_dtype)


def _run(where: Where, cases: Sequence[Case], scope: Scope) -> list[list[Returned]]:
    """What each rank returned for each case.

    Raises:
        RankError: a rank failed.
    """
    module = results_of_rank.__module__
    return start_ranks(results_of_rank, where, cases, scope.seed, scope.timeout, ranks=where.ranks, imports=[module])


def _failed(where: Where, error: RankError) -> Check:
    """The check whose ranks failed. What is missing here is no fault; anything else is."""
    is_absent = error.exception == UnavailableError.__name__
    return Check(where.name, "", None if is_absent else False, error.headline if error.expected else str(error))


def _judged(
    where: Where, case: Case, of_ranks: list[Returned], alone: Returned | None, reference: Reference, seed: int
) -> Check:
    """Compares what ranks returned with the reference and, bit by bit, with what one rank returned."""
    place = f"{where.name}, {_NAMES_OF_DTYPES[case.heads.dtype]}"
    problem = f"{_in_words(case.heads)}, {case.name}"
    if alone is not None and alone.refusal:  # its own check says whether that is a fault
        return Check(place, problem, None, alone.refusal)
    if refused := next((one for one in of_ranks if one.refusal), None):
        return Check(place, problem, False if refused.is_fault else None, refused.refusal)
    layout = case.layout(where.ranks, seed)
    runs = [_whole(case, layout, [one.runs[run] for one in of_ranks]) for run in range(len(of_ranks[0].runs))]
    results = runs[0]
    most_rms = MOST_RMS_OF_FLASH if where.attention == "flash" else MOST_RMS
    errors = _largest([reference.errors(run, most_rms) for run in (results, *runs[2:])])
    rows = [rows_of_rank(case, layout, rank) for rank in range(len(of_ranks))]
    errors |= reference.errors_of_max_logits(rows, [one.max_logits for one in of_ranks])
    wrong = [f"{one} has {error:.3g} times the error allowed" for one, error in errors.items() if not error <= 1]
    if not all(_is_padding(case, layout, rank, run) for rank, one in enumerate(of_ranks) for run in one.runs):
        wrong.append("padding rows have not out 0, lse -inf and gradients 0")
    if where.attention != "flash":  # ATen's flash attention adds up in any order
        if not all(np.array_equal(a, b) for one in of_ranks for a, b in zip(*one.runs[:2], strict=True)):
            wrong.append("the second time other bits")
        one_rank = None if alone is None else _whole(case, case.layout(1, seed), [alone.runs[0]])
        if one_rank is not None and not all(map(torch.equal, results[:3], one_rank[:3])):
            wrong.append("out, lse or dq have not the bits of one rank")
        of_all = [np.max(found, axis=0) for found in zip(*(one.max_logits for one in of_ranks), strict=True)]
        expected = of_all[:1] if alone is None else alone.max_logits[:1]
        if not all(np.array_equal(found, expected[0]) for found in of_all):
            wrong.append("max_logits have not the bits of one rank")
    return Check(place, problem, not wrong, "; ".join(wrong), errors)


class Reference:
    """The right results of a case, and how far off those are that are rounded no more than they must."""

    def __init__(self, case: Case, seed: int) -> None:
        inputs = random_inputs(case, seed)
        self._dtype = case.heads.dtype
        self._right = exact(case, inputs)
        self._logits = largest_logits(case, inputs)
        self._sizes: dict[str, tuple[float, float]] = {}
        for name, expected, best in zip(NAMES, self._right, rounded(case, inputs), strict=True):
            if expected is not None and best is not None:
                off = best.double() - expected
                self._sizes[name] = _rms(off), off.abs().max().item()
        if inputs.sinks is not None:  # a few sums over all rows, whose terms were rounded
            terms = self._right.terms_of_dsinks(inputs).square().sum(0).sqrt()
            self._most_of_dsinks = SUM_UNITS * _UNIT_ROUNDOFF[self._dtype] * terms

    def errors_of_max_logits(
        self, rows: Sequence[torch.Tensor], of_ranks: Sequence[Sequence[np.ndarray[Any, Any]]]
    ) -> dict[str, float]:
        """The largest error of the largest logits, as above, of ranks that have these rows; -1 is no row."""
        fractions, most = [], LOGIT_ERROR * self._logits.abs().max()
        for of_rank, found_by_rank in zip(rows, of_ranks, strict=True):
            own = self._logits[of_rank[of_rank >= 0]]
            right = own.amax(0) if len(own) else torch.full(own.shape[1:], -math.inf, dtype=own.dtype)
            for found in map(torch.from_numpy, found_by_rank):
                off = torch.where(found == right, 0.0, (found.double() - right).abs())  # also where both are -inf
                fractions.append((off / most).max().item())
        return _largest([{"max_logits": one} for one in fractions]) if fractions else {}

    def errors(self, results: Sequence[torch.Tensor], most_rms: float) -> dict[str, float]:
        """The largest error of each result as a fraction of the allowed one; NaN where a result is NaN."""
        errors = {}
        for name, result, expected in zip(NAMES, results, self._right, strict=False):
            assert expected is not None
            off = result.double() - expected
            if name == "dsinks":
                errors[name] = (off.abs() / self._most_of_dsinks).max().item()
                continue
            dtype = torch.float32 if name == "lse" else self._dtype
            ulp = 2.0 ** (math.floor(math.log2(expected.abs().max().item())) - _MANTISSA_BITS[dtype])
            more = LSE_UNITS * _UNIT_ROUNDOFF[self._dtype] if name == "lse" else 0.0
            theirs, their_largest = self._sizes[name]
            rms = _rms(off) / (most_rms * theirs + _UNIT_ROUNDOFF[dtype] / 8 * _rms(expected) + more)
            largest = off.abs().max().item() / (MOST_LARGEST * their_largest + ulp + more)
            errors[name] = max(rms, largest) if not math.isnan(largest) else math.nan
        return errors


def _in_words(heads: Heads) -> str:
    dims = f"{heads.dim}" if heads.value_dim == heads.dim else f"{heads.dim}/{heads.value_dim}"
    return f"{heads.q}:{heads.kv} heads of {dims}"


def _whole(case: Case, layout: Layout, of_ranks: Sequence[Rows]) -> list[torch.Tensor]:
    """The results of all rows of the problem, from those of each rank."""
    whole = []
    for i, one in enumerate(of_ranks[0]):
        if i == NAMES.index("dsinks"):
            whole.append(torch.stack([torch.from_numpy(rows[i]) for rows in of_ranks]).sum(0))
            continue
        total = torch.full((case.num_rows, *one.shape[1:]), math.nan)
        for rank, of_rank in enumerate(of_ranks):
            rows = rows_of_rank(case, layout, rank)
            total[rows[rows >= 0]] = torch.from_numpy(of_rank[i])[rows >= 0]
        whole.append(total)
    return whole


def _is_padding(case: Case, layout: Layout, rank: int, results: Rows) -> bool:
    """Whether a rank's padding rows have out 0, lse -inf and gradients 0."""
    is_padding = rows_of_rank(case, layout, rank) < 0
    values = (0.0, -math.inf, 0.0, 0.0, 0.0)
    return all(bool((torch.from_numpy(t)[is_padding] == x).all()) for t, x in zip(results, values, strict=False))


def _largest(errors: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest error of each result; NaN counts as the largest."""
    return {name: max((of[name] for of in errors), key=lambda x: (math.isnan(x), x)) for name in errors[0]}


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()
