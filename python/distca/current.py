"""The current plan: for models that cannot hand a plan on to their attention layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.planner.layout import Layout
from distca.planner.plan import Plan, Plans
from distca.planner.plan_source import PlanSource


class Current(NamedTuple):
    """A plan and the context of its steps."""

    plan: Plan | Plans | PlanSource
    context: Context | str

    @property
    def rows(self) -> tuple[Layout, int]:
        """The layout of the rows that the model has now, and this rank's number in it."""
        return self.plan.rows() if isinstance(self.plan, PlanSource) else (self.plan.layout, self.plan.rank)

    @property
    def ranks(self) -> list[int] | None:
        """The ranks in the context that have these rows; None for all."""
        return self.plan.ranks() if isinstance(self.plan, PlanSource) else None

    @property
    def longest_document(self) -> int:
        """Rows of the batch's longest document, on whatever rank."""
        return self.plan.longest_document() if isinstance(self.plan, PlanSource) else self.plan.layout.longest_document


# Each thread has its own value (loopback ranks are threads), and so has each half of a ping-pong.
_current: ContextVar[Current | None] = ContextVar("distca.current", default=None)
_num_open = 0


def may_be_open() -> bool:
    """Whether a `using` is open in any thread. Compiled code, which cannot ask for the current plan, guards on this."""
    return _num_open > 0


def current() -> Current | None:
    """What the innermost `using` around this call has set; None outside of any."""
    return _current.get()


@contextmanager
def using(plan: Plan | Plans | PlanSource, *, context: Context | str = "default") -> Iterator[None]:
    """Makes a plan current: models of transformers called inside take it as if it were their keyword ``plan``::

        with distca.using(plan):
            logits = model(ids, position_ids=plan.layout.position_ids(plan.rank)[None], use_cache=False).logits
        loss_of(logits).backward()

    It is for code between the caller and the model that does not hand keywords on. It holds for this thread until the
    ``with`` block ends. Inside another one, the inner plan counts. Models with another ``attn_implementation`` ignore
    it. Backward may run outside, unless the caller's own activation checkpointing runs a layer again in it.

    Args:
        plan: the plan of the step, or the plans if layers differ in their sliding window, or the ``plan`` of
            `distca.pipeline.Ticks`.
        context: the context or its name.

    Raises:
        InvalidArgumentError: on entering, if `plan` is none of these; later, as from a model's call with
            ``plan``.
    """
    if not isinstance(plan, Plan | Plans | PlanSource):
        raise InvalidArgumentError(f"using: plan is a {type(plan).__name__}; a distca.Plan or distca.Plans is expected")
    global _num_open
    before = _current.set(Current(plan, context))
    _num_open += 1
    try:
        yield
    finally:
        _num_open -= 1
        _current.reset(before)
