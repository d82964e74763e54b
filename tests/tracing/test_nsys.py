"""NVTX ranges, seen by a stand-in that records them. They have not been run on a GPU."""

from __future__ import annotations

import pytest
import torch

import distca
from distca.trace.nsys import Capture
from support.batches import Batch, random_batch, spill
from support.groups import loopback_group, on_all_ranks, run_step

HEADS = distca.Heads(2, 1, 16)
LENGTHS = (40, 9)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of ranges in the order in which they were pushed, and a dash for each that was popped."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("-"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    return seen


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(LENGTHS, HEADS, seed=1)


def one_rank(**options: bool) -> distca.Context:
    return distca.init(transport="loopback", max_tokens=sum(LENGTHS), heads=HEADS, name="nsys", **options)


def test_operators_of_a_context_with_nsys_are_ranges_of_their_names(ranges: list[str], batch: Batch) -> None:
    plan = distca.plan(spill(LENGTHS, 1), HEADS)
    with one_rank(nsys=True) as context:
        ranges.clear()  # the library has tried whether there is NVTX
        run_step(batch, plan, context)
        assert ranges == ["distca::core_attention", "-", "distca::core_attention_backward", "-"]
        ranges.clear()
        q, k, v = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
        step = distca.dispatch(q, k, v, plan, context=context)
        distca.attend(step)
        distca.collect(step)[0].sum().backward()
    parts = ["dispatch", "attend", "collect", "dispatch_backward", "attend_backward", "collect_backward"]
    assert ranges == [word for part in parts for word in (f"distca::{part}", "-")]


def test_an_operator_that_fails_leaves_its_range(ranges: list[str], batch: Batch) -> None:
    with one_rank(nsys=True) as context, pytest.raises(distca.InvalidArgumentError):
        distca.core_attention(batch.q[:3], batch.k, batch.v, distca.plan(spill(LENGTHS, 1), HEADS), context=context)
    assert ranges[-2:] == ["distca::core_attention", "-"]


@pytest.mark.parametrize(("value", "argument", "on"), [("1", None, True), ("1", False, False), ("0", None, False),
                                                       ("", None, False), ("0", True, True)])  # fmt: skip
def test_the_environment_switches_ranges_on_where_the_argument_says_nothing(
    value: str, argument: bool | None, on: bool, ranges: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_NSYS", value)
    with one_rank(nsys=argument) as context:
        assert context.nsys == on
        assert bool(ranges) == on


def test_without_nsys_nothing_of_nvtx_is_touched(ranges: list[str], batch: Batch) -> None:
    plan = distca.plan(spill(LENGTHS, 2), HEADS)
    with loopback_group(plan) as contexts:
        on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context))
    assert ranges == []


def test_wrong_words_and_a_torch_without_nvtx_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_NSYS", "yes")
    with pytest.raises(distca.InvalidArgumentError, match="ENABLE_NSYS is 'yes'; 1 .* and 0"):
        one_rank()

    def no_nvtx(_name: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", no_nvtx)
    with pytest.raises(distca.DeviceError, match=r"nsys = True \(or ENABLE_NSYS=1\) .* does not have"):
        one_rank(nsys=True)


def test_a_capture_leaves_out_the_first_step_and_ends_after_its_steps(ranges: list[str]) -> None:
    capture = Capture(on=True, num_steps=2)
    for number in range(6):
        capture.step(number + 1)
    capture.close()
    assert ranges == ["start", "training step 1", "-", "training step 2", "-", "stop"]


def test_a_capture_ends_with_the_run_and_is_nothing_when_off(ranges: list[str]) -> None:
    capture = Capture(on=True, num_steps=9)
    capture.step(1)
    capture.close()
    assert ranges == ["start", "training step 1", "-", "stop"]
    ranges.clear()
    capture = Capture(on=False, num_steps=9)
    capture.step(1)
    capture.close()
    assert ranges == []
