"""The heap's default size is linear in the tokens, enough for published batches, and known before anything runs."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

import distca
from distca.apps.cli import main
from distca.apps.common.workloads import draw_documents, pretrain_lengths, read_lengths
from distca.planner.memory import default_heap_bytes

LARGE = distca.Heads(64, 8, 128, dtype=torch.bfloat16)
#: The bytes of a row: q and out have 64 heads, k and v 8, in 2 bytes, and their gradients need the same again.
LARGE_ROW = 2 * (64 * 128 * 2 + 64 * 128 * 2 + 8 * 128 * 2 + 8 * 128 * 2)
SMALL = distca.Heads(2, 1, 16)


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_the_default_is_six_times_the_ranks_own_rows(tokens: int) -> None:
    assert default_heap_bytes(tokens, LARGE) == 6 * tokens * LARGE_ROW


def test_the_default_does_not_depend_on_the_number_of_ranks() -> None:
    slots = []
    for ranks in (1, 3, 8):
        for context in distca.loopback(ranks, max_tokens=4096, heads=distca.Heads(8, 4, 64)):
            slots.append(context.slot_bytes)
            context.close()
    assert slots == [6 * 4096 * 2 * (8 + 4) * (64 + 64) * 4 // 2] * 12


def test_few_tokens_have_a_heap_that_small_documents_fit_into_however_they_are_cut() -> None:
    (context,) = distca.loopback(1, max_tokens=1, heads=SMALL)
    with context:
        assert 2 * context.slot_bytes == 8 << 20


@pytest.mark.parametrize("ahead", [False, True], ids=["here", "in PlanAhead's thread"])
def test_a_heap_that_is_too_small_to_balance_is_a_warning_once(ahead: bool, caplog: pytest.LogCaptureFixture) -> None:
    uneven = distca.Layout.from_documents([[2000], [10]])
    small, _ = contexts = distca.loopback(2, max_tokens=1, heads=LARGE, heap_bytes=1 << 20)

    def plans_in(context: distca.Context, **options: object) -> list[distca.Plan]:
        if not ahead:
            return [distca.plan(uneven, LARGE, context=context, **options) for _ in range(2)]
        with distca.PlanAhead([1, 2], heads=LARGE, layout=lambda _: uneven, context=context, **options) as steps:
            return [plan for _, plan in steps]

    plans_in(small, capacity=1 << 10)  # its own capacity, not the heap's
    plans_in(small, balance=False)
    plans_in(small, tolerance=1.0)
    assert not caplog.records
    made = plans_in(small)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("distca", "WARNING")
    for said in (small.name, "capacity of rank", "imbalance is 2.00", "1.05 was asked for", "max_tokens"):
        assert said in record.getMessage()
    assert {plan.digest for plan in made} == {distca.plan(uneven, LARGE, capacity=small.slot_bytes).digest}
    (heap_bytes,) = (int(n.replace(",", "")) for n in re.findall(r"heap_bytes of at least ([\d,]+)", caplog.text))
    enough = distca.loopback(2, max_tokens=1, heads=LARGE, heap_bytes=heap_bytes)
    assert plans_in(enough[0])[0].stats.imbalance_after <= 1.05
    assert len(caplog.records) == 1
    for context in [*contexts, *enough]:
        context.close()


@pytest.mark.parametrize("layout_kind", ["documents", "packed"])
@pytest.mark.parametrize(("ranks", "tokens"), [(8, 32768), (64, 8192), (512, 8192)])
def test_published_lengths_plan_within_the_default_at_the_usual_tolerance(
    ranks: int, tokens: int, layout_kind: str
) -> None:
    lengths = read_lengths(pretrain_lengths())
    capacity = default_heap_bytes(tokens, LARGE) // 2
    for seed in range(3):
        if layout_kind == "documents":
            layout = distca.Layout.from_documents(draw_documents(lengths, ranks, tokens, seed))
        else:  # whole documents, cut wherever a rank is full; the longest of all is among them
            generator, drawn = random.Random(seed), [max(lengths)]
            room = ranks * tokens - drawn[0]
            while (length := generator.choice(lengths)) <= room:
                drawn.append(length)
                room -= length
            generator.shuffle(drawn)
            layout = distca.Layout.packed(drawn, ranks=ranks, tokens_per_rank=tokens)
        stats = distca.plan(layout, LARGE, tolerance=0.05, capacity=capacity).stats
        assert stats.binding is None and stats.imbalance_after <= 1.05 and stats.slot_bytes <= capacity


def test_a_document_that_does_not_fit_says_the_number_that_does() -> None:
    layout = distca.Layout.head_tail([1 << 21], ranks=256)
    with pytest.raises(distca.CapacityError, match="give distca.init heap_bytes >= ") as told:
        distca.plan(layout, LARGE, capacity=default_heap_bytes(8192, LARGE) // 2)
    number = int(re.findall(r"heap_bytes >= (\d+)", str(told.value))[0])
    assert distca.plan(layout, LARGE, capacity=number // 2).stats.slot_bytes <= number // 2
    with pytest.raises(distca.CapacityError):
        distca.plan(layout, LARGE, capacity=number // 2 - 64)


def _told(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())  # type: ignore[arg-type]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_command_says_what_batches_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps([5, 64, 300, 17, 1200, 2, 90, 34]))
    model = ["--q-heads", "8", "--kv-heads", "2", "--head-dim", "64", "--dtype", "fp32"]
    batch = ["--lengths", str(tmp_path / "lengths.json"), "--ranks", "4", "--tokens-per-rank", "1500", "--seed", "3"]
    assert main(["plan", *model, *batch, "--heap", "5"]) == 0
    told = _told(capsys)
    assert told["batches"] == "5, of 4 ranks, at most 1,500 tokens a rank"
    wanted, smallest = (_number(told[name]) for name in list(told)[1:3])
    assert smallest <= wanted
    heads = distca.Heads(8, 2, 64)
    layouts = [
        distca.Layout.from_documents(draw_documents([5, 64, 300, 17, 1200, 2, 90, 34], 4, 1500, seed))
        for seed in range(3, 8)
    ]
    assert wanted == 2 * max(distca.plan(layout, heads).stats.slot_bytes for layout in layouts)
    for layout in layouts:
        assert distca.plan(layout, heads, capacity=smallest // 2).stats.binding in (None, "single rows")
    assert _number(told["default heap_bytes for these tokens"]) == default_heap_bytes(1500, heads)
    assert told["batches in the default heap"] == "all fit, none less balanced"


def test_the_command_says_how_many_batches_the_default_is_too_small_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    batch = ["--workload", str(path), "--layout", "head-tail", "--q-heads", "8", "--kv-heads", "8"]
    path.write_text(json.dumps({"documents": [[1 << 18]] + [[1]] * 63}))
    assert main(["plan", *batch, "--heap"]) == 0
    assert _told(capsys)["batches in the default heap"] == "1 do not fit"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heap", "0"], "--heap 0: at least one batch"),
        (["--heap", "--json", "x.json"], "--json and --plot take one plan"),
    ],
)
def test_mistakes_with_the_heap_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"documents": [[64], [64]]}))
    assert main(["plan", "--workload", str(path), *arguments]) != 0
    assert message in capsys.readouterr().err
