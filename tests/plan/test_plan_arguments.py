"""Wrong arguments of `distca.plan` are refused with the value and what is allowed."""

from __future__ import annotations

import re

import pytest
import torch

import distca
from distca import _C
from support.batches import spill
from support.random_plans import HEADS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tolerance": -0.01}, "tolerance = -0.01; 0 to 1"),
        ({"tolerance": 1.5}, "tolerance = 1.5; 0 to 1"),
        ({"tolerance": float("nan")}, "tolerance = nan; 0 to 1"),
        ({"mask": "diagonal"}, "mask = 'diagonal'; 'causal', 'full'"),
        ({"window": 0}, "window = 0"),
        ({"window": 0, "mask": "full"}, "window = 0"),
        ({"servers": []}, "servers is empty"),
        ({"servers": [3]}, "servers = [3]; ranks from 0 to 2"),
        ({"servers": [0], "balance": False}, "without balance"),
        ({"ranks_per_node": 0}, "ranks_per_node = 0; None or 1 to"),
        ({"min_rows": 0}, "min_rows = 0"),
        ({"min_rows": -5}, "min_rows = -5"),
        ({"capacity": 0}, "capacity = 0"),
        ({"capacity": -1}, "capacity = -1"),
        ({"rank": 3}, "rank = 3; 0 to 2"),
        ({"rank": -1}, "rank = -1; 0 to 2"),
        ({"cost": distca.CostModel(-1, 0)}, "per_pair = -1"),
        ({"cost": distca.CostModel(0, -1)}, "per_row = -1"),
        ({"cost": distca.CostModel(0, 0)}, "not both 0"),
        ({"cost": distca.CostModel(float("nan"))}, "per_pair is nan; integers up to 1048576"),  # type: ignore[arg-type]
        ({"cost": distca.CostModel(1, 2**70)}, f"per_row is {2**70}"),
        ({"cost": distca.CostModel(rates=((float("nan"),),))}, "a rate is nan"),  # type: ignore[arg-type]
        ({"cost": distca.CostModel(2**20 + 1, 0)}, str(2**20 + 1)),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused_with_the_value_and_what_is_allowed(
    changes: dict[str, object], said: str
) -> None:
    arguments: dict[str, object] = {"layout": spill((300, 5), 3), "heads": HEADS[0]} | changes
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.plan(**arguments)  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([(0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 2, 3)], "tasks[1] is on rank 3, which does not serve"),
        ([(0, 0, 301, 0, 2, 0), (1, 0, 5, 0, 2, 0)], "tasks[0] has rows [0, 301) of document 0, which has 300"),
        ([(0, 0, 300, 0, 3, 0), (1, 0, 5, 0, 2, 0)], "tasks[0] has key/value heads [0, 3) of 2"),
        ([(0, 5, 5, 0, 2, 0)], "tasks[0] has rows [5, 5)"),
        ([(2, 0, 5, 0, 2, 0)], "tasks[0] is of document 2; 0 to 1"),
        ([(0, 0, 300, 0, 2, 0)], "row 0 of document 1, key/value head 0, exactly once"),
        ([(0, 0, 300, 0, 2, 0), (1, 0, 4, 0, 2, 0)], "row 4 of document 1, key/value head 0, exactly once"),
        ([(0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 1, 0)], "row 0 of document 1, key/value head 1, exactly once"),
        (
            [(0, 0, 300, 0, 1, 0), (0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 2, 0)],
            "row 0 of document 0, key/value head 0, exactly once",
        ),
        ([], "row 0 of document 0, key/value head 0, exactly once"),
    ],
    ids=str,
)
def test_a_schedule_that_does_not_compute_every_row_and_head_once_is_refused(
    tasks: list[tuple[int, int, int, int, int, int]], said: str
) -> None:
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.plan(spill((300, 5), 3), distca.Heads(4, 2, 16), tasks=tasks)
    assert said in str(caught.value)


def test_a_dtype_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(
        distca.InvalidArgumentError, match=r"torch\.float64; torch\.float32, torch\.bfloat16, torch\.flo"
    ):
        distca.Heads(4, 2, 16, dtype=torch.float64)


def test_a_layout_whose_cost_would_overflow_is_refused() -> None:
    layout = distca.Layout.from_documents([[2**31]])
    with pytest.raises(distca.InvalidArgumentError, match="cost"):
        distca.plan(layout, HEADS[0], cost=distca.CostModel(2**20, 0))


def test_the_cost_counts_what_documents_see() -> None:
    """512 ranks of a million tokens each, in the dearest units that come with distca."""
    cost = distca.CostModel.load("h200")
    layout = distca.Layout.from_documents([[2**20]] * 512)
    distca.plan(layout, distca.Heads(64, 8, 128, dtype=torch.bfloat16), cost=cost, balance=False)
    with pytest.raises(distca.InvalidArgumentError, match="cost"):
        distca.plan(layout, distca.Heads(512, 8, 128), cost=cost, mask="full", balance=False)


def test_a_window_is_as_long_as_the_longest_document_at_most() -> None:
    layout = distca.Layout.from_documents([[5]])
    assert distca.plan(layout, HEADS[0], window=2**31).window == 2**31
    for window in (0, 2**31 + 1):
        with pytest.raises(distca.InvalidArgumentError, match="window = .*; None or an integer from 1 to 2147483648"):
            distca.plan(layout, HEADS[0], window=window)


def test_scores_of_no_documents_are_an_empty_list() -> None:
    plan = distca.plan(distca.Layout([[(distca.PADDING, 0, 3)], []]), HEADS[0], scores=[])
    assert plan.num_rows == 3 and not plan.tasks


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("heads", (8, 2, 64, 64, 3), "heads: dtype number 3; 0 to 2 are allowed"),
        ("heads", (8, 2, 64, 64, -1), "heads: dtype number -1"),
        ("heads", (8, 3, 64, 64, 0), "8 query heads and 3 key/value heads"),
        ("scores", [(2, 0, None, None)], "plan: mask number 2; 0 to 1 are allowed"),
        ("scores", [(1, -5, None, None)], "plan: window = -5"),
        ("scores", [(0, 2**31 + 1, None, None)], "plan: window = 2147483649"),
        ("scores", [], "0 different masks"),
        ("ranks_per_node", -1, "plan: ranks_per_node = -1"),
        ("reduce_dtype", 1, "plan: reduce_dtype number 1; float32 or the dtype of the heads, float32, is allowed"),
        ("reduce_dtype", 7, "plan: reduce_dtype number 7"),
    ],
)
def test_the_core_checks_its_options_by_itself(name: str, value: object, message: str) -> None:
    options = _C.PlanOptions()
    options.heads = (8, 2, 64, 64, 0)
    setattr(options, name, value)
    with pytest.raises(distca.InvalidArgumentError, match=re.escape(message)):
        _C.Plan(_C.Layout.from_documents([[100], [20]]), options)


def test_an_option_that_the_core_does_not_have_is_refused() -> None:
    with pytest.raises(AttributeError):
        _C.PlanOptions().tolerance = 0.1  # type: ignore[attr-defined]
