"""One word of a plan is changed on one rank, and the slice's digests and checksum are made to match.

Either a rank notices before it uses anything wrong, and then every rank has an error, or nothing has changed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings

import distca
from distca import _C
from support.batches import (
    Batch,
    data_parallel,
    random_batch,
    random_tasks,
    rows_of_rank,
    scattered,
    spill,
    spill_with_empty_ranks,
)
from support.groups import loopback_group, outcomes
from support.plan_reader import (
    ADD,
    TABLES,
    TENSORS,
    Header,
    made_alike,
    read_slice,
    with_checksum,
    with_digests,
    with_words,
)

LENGTHS = (70, 1, 130, 33, 9)
HEADS = distca.Heads(4, 2, 8, 16)
NARROW = distca.Heads(4, 2, 8, 16, torch.bfloat16)

#: Words that say what is to be computed. If other ranks do not have such a word, changing it makes another plan that is
#: right in itself: no check can know that it was not meant.
WHAT_TO_COMPUTE = {"scores.window", "scores.mask_kind", "scores.scale", "scores.softcap"}


@dataclasses.dataclass
class Case:
    """A plan, and what it computes when nothing is changed."""

    plan: distca.Plan
    batch: Batch
    right: list[Any]


def _plan_of(layout: Callable[..., distca.Layout], ranks: int, **options: Any) -> distca.Plan:
    return distca.plan(layout(LENGTHS, ranks, 3), HEADS, **({"min_rows": 1, "tolerance": 0.0} | options))


def _many_rounds(heads: distca.Heads = HEADS, **options: Any) -> distca.Plan:
    layout = distca.Layout.from_documents([[200], [3], [3], [3]])
    return distca.plan(layout, heads, min_rows=1, tolerance=0.0, split_heads=False, **options)


PLANS: dict[str, Callable[[], distca.Plan]] = {
    "causal": lambda: _plan_of(spill, 2),
    "window": lambda: _plan_of(spill, 3, window=20),
    "full": lambda: _plan_of(data_parallel, 3, mask="full"),
    "full window": lambda: _plan_of(data_parallel, 3, mask="full", window=40),
    "retained keys": lambda: _plan_of(spill, 3, retain_bytes=2**30),
    "some keys retained": lambda: _plan_of(spill, 2, retain_bytes=[12_000, 0]),
    "dedicated servers": lambda: _plan_of(data_parallel, 3, servers=[1, 2]),
    "head ranges": lambda: _plan_of(scattered, 3, tasks=random_tasks(scattered(LENGTHS, 3, 3), HEADS.kv, 5)),
    "rounds": _many_rounds,
    "contributions in bfloat16": lambda: _many_rounds(NARROW, reduce_dtype=torch.bfloat16),
    "rounds of rows": lambda: _plan_of(
        scattered, 3, tasks=random_tasks(scattered(LENGTHS, 3, 3), HEADS.kv, 6), round_bytes=1
    ),
    "padding": lambda: _plan_of(scattered, 4),
    "a rank without rows": lambda: _plan_of(spill_with_empty_ranks, 3),
    "one rank": lambda: _plan_of(scattered, 1),
}


def run_ranks(
    plan: distca.Plan,
    batch: Batch,
    plans: Sequence[distca.Plan],
    backwards: Sequence[distca.Plan | None] | None = None,
) -> list[Any]:
    """The results of each rank's forward and backward with its plans, in memory that is full of NaN; or its error."""

    def step(rank: int, context: distca.Context) -> tuple[torch.Tensor, ...]:
        q, k, v, dout = (rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v, batch.dout))
        inputs = [t.requires_grad_() for t in (q, k, v)]
        other = None if backwards is None else backwards[rank]
        out, lse = distca.core_attention(q, k, v, plans[rank], plan_backward=other, context=context)
        return out.detach(), lse, *torch.autograd.grad(out, inputs, dout)

    with loopback_group(plan, timeout=0.2) as contexts:
        return outcomes(contexts, step)


def make_case(name: str) -> Case:
    plan = PLANS[name]()
    layout_lengths = plan.layout.document_lengths
    batch = random_batch(layout_lengths, plan.heads, 1)
    right = run_ranks(plan, batch, [plan.for_rank(rank) for rank in range(plan.layout.num_ranks)])
    assert not any(isinstance(result, BaseException) for result in right), right
    return Case(plan, batch, right)


def changed_word(rng: random.Random, words: Sequence[int], index: int) -> int:
    """Another value for a word: near the old one, with a flipped bit, that of another word, or far out."""
    old, used = words[index], words[2]
    value = rng.choice(
        (
            old + rng.choice((-64, -8, -1, 1, 8, 64)),
            old ^ (1 << rng.randrange(63)),
            words[rng.randrange(4, used)],
            rng.choice((0, -1, 1, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**31, 2**32)),
            rng.randrange(200),
            64 * rng.randrange(1000),
        )
    )
    return value if -(2**63) <= value < 2**63 else -old - 1


def field_of(words: Sequence[int], index: int) -> str:
    """The name of the field that a word belongs to."""
    if index < len(Header._fields):
        return f"header.{Header._fields[index]}"
    for table, kind in enumerate(TABLES):
        begin, count = words[len(Header._fields) + 2 * table :][:2]
        if begin <= index < begin + count * len(kind._fields):
            return f"{kind.__name__}.{kind._fields[(index - begin) % len(kind._fields)]}"
    return "header.tables"


def repaired(words: Sequence[int]) -> list[int]:
    """The words with matching digests and checksum, as far as the words still say where the tables are."""
    size, fields = len(words), len(Header._fields)
    spans = [words[fields + 2 * i :][:2] for i in range(len(TABLES))]
    known = fields <= words[2] <= size and all(0 <= begin <= size and 0 <= count <= size for begin, count in spans)
    if known:
        return with_digests(words)
    return with_checksum(words) if 0 <= words[2] <= size else list(words)


def trial(rng: random.Random, cases: dict[str, Case], everywhere: bool) -> tuple[str, str]:
    """What became of one changed word: the outcome, and the word's name.

    With `everywhere` the digests of all ranks' slices are made to match, so that only the tables themselves can show
    the change.
    """
    name = rng.choice(list(cases))
    case = cases[name]
    ranks = range(case.plan.layout.num_ranks)
    rank = rng.choice(ranks)
    words = case.plan.for_rank(rank).tensor.tolist()
    index = rng.randrange(words[2])
    value = changed_word(rng, words, index)
    field = field_of(words, index)
    if value == words[index]:
        return "unchanged", field
    changed = with_words(case.plan.for_rank(rank), repaired([*words[:index], value, *words[index + 1 :]]))
    # After a crash this is the last line.
    print(f"{name}, rank {rank}, word {index} ({field}) = {value}", file=sys.stderr, flush=True)
    try:
        _C.validate_plan(changed.tensor.numpy())
    except distca.PlanFormatError:
        if rng.random() > 0.02:  # most are not run, because ranks that wait for the one that refuses are slow
            return "refused", field
    plans = [case.plan.for_rank(r) for r in ranks]
    if everywhere:
        plans = [with_words(p, made_alike(p.tensor.tolist(), changed.tensor.tolist())) for p in plans]
    ours = [changed if r == rank else plans[r] for r in ranks]
    results = (
        run_ranks(case.plan, case.batch, plans, ours) if rng.random() < 0.25 else run_ranks(case.plan, case.batch, ours)
    )
    wrong = False
    kinds = set()
    for result, right in zip(results, case.right, strict=True):
        if isinstance(result, BaseException):
            assert isinstance(result, distca.DistcaError), repr(result)
            kinds.add(type(result).__name__)
        elif not all(torch.equal(a, b) for a, b in zip(result, right, strict=True)):
            wrong = True
    if wrong:
        return "other results", field
    for kind in ("PlanFormatError", "InvalidArgumentError", "CapacityError", "PlanMismatchError", "PeerTimeoutError"):
        if kind in kinds:
            return kind, field
    return (",".join(sorted(kinds)) if kinds else "same results"), field


def main(seed: int, trials: int, everywhere: bool) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    cases = {name: make_case(name) for name in PLANS}
    seen: Counter[str] = Counter()
    words: dict[str, Counter[str]] = {}
    for _ in range(trials):
        outcome, field = trial(rng, cases, everywhere)
        seen[outcome] += 1
        words.setdefault(outcome, Counter())[field] += 1
    quiet = {outcome: dict(words.get(outcome, {})) for outcome in ("other results", "same results", "PeerTimeoutError")}
    print(json.dumps({"outcomes": dict(seen), "words": quiet}))


#: The number of changed words in all tests; `make fuzz` has 20 times as many.
TRIALS = 250 * settings.default.max_examples // 100


@pytest.mark.parametrize("seed", range(2))
def test_a_changed_word_of_a_plan_is_noticed_by_all_ranks_or_changes_nothing(seed: int) -> None:
    """The trials run in a process of their own. It must not crash, and its fresh memory is not zero."""
    path = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, __file__, str(seed), str(TRIALS // 2)],
        env=os.environ | {"PYTHONPATH": path, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "85", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, f"seed {seed}: {ran.stdout[-200:]}\n{ran.stderr[-4000:]}"
    seen = json.loads(ran.stdout.splitlines()[-1])
    print(seen)
    assert seen["outcomes"]["refused"] > TRIALS // 8
    wrong = seen["words"]["other results"]
    assert set(wrong) <= WHAT_TO_COMPUTE, seen
    assert sum(wrong.values()) <= max(1, 0.005 * TRIALS / 2), seen


def test_the_plans_whose_words_are_changed_are_of_every_kind() -> None:
    slices = {name: read_slice(make().tensor.tolist()) for name, make in PLANS.items()}
    assert len(slices) == len(PLANS)
    assert slices["rounds"].header.num_rounds > 1
    assert {group.round for group in slices["rounds of rows"].groups} >= {0, 1}
    assert any(r.action == ADD and TENSORS[r.tensor] == "dv" for r in slices["contributions in bfloat16"].receives[1])
    assert slices["window"].scores[0].window > 0 and slices["full"].scores[0].mask_kind == 1
    assert any(s.header.retained_bytes for s in slices.values())
    assert any(segment.document < 0 for segment in slices["padding"].segments)
    assert any(group.kv_head_end - group.kv_head_begin < HEADS.kv for group in slices["head ranges"].groups)
    assert 0 in [PLANS["a rank without rows"]().for_rank(rank).num_rows for rank in range(3)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), everywhere=len(sys.argv) > 3)
