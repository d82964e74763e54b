"""Fixtures of the tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.groups import loopback_group
from support.refusals import Group, plan_of_two


@pytest.fixture
def group() -> Iterator[Group]:
    """Two ranks of a loopback group, with a plan that they can compute."""
    plan = plan_of_two()
    with loopback_group(plan, timeout=20.0) as contexts:
        yield Group(contexts, plan)
