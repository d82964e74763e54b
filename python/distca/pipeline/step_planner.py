"""Plans of steps in which every stage has rows of another micro-batch and another layer: `StepPlanner`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from distca.errors import CapacityError
from distca.planner.layout import Chunk, Layout
from distca.planner.plan import Plan
from distca.planner.planning import plan as plan_of
from distca.planner.scores import Scores, ScoresOfDocuments
from distca.planner.stats import Task
from distca.registry import find_context


class StageStep(NamedTuple):
    """What one stage has in a step: the rows of a micro-batch, in a layer with these scores, perhaps in chunks."""

    microbatch: int
    scores: Scores
    chunk: Chunk | None = None


#: What each stage has in a step; None: it has no rows.
Step = tuple[StageStep | None, ...]


class StepPlanner:
    """Makes the plans of an iteration's steps, and uses schedules again.

    Args:
        layouts: for each micro-batch its rows over the ranks of one stage.
        stages: for each stage its ranks.
        options: the other arguments of `distca.plan`.
        across_stages: False lets each stage compute its own rows.
    """

    def __init__(
        self, layouts: list[Layout], stages: list[list[int]], options: dict[str, Any], across_stages: bool
    ) -> None:
        self._layouts, self._stages, self._options = layouts, stages, options
        self._across_stages = across_stages
        self._chunked: dict[tuple[int, Chunk], Layout] = {}
        #: The first plan of each kind, and the order in which its layout has the stages' documents.
        self._made: dict[Step, tuple[Plan, list[int]]] = {}
        self._identity = list(range(sum(map(len, stages))))
        self._mirror = list(self._identity)
        for ranks, others in zip(stages, reversed(stages), strict=True):
            for rank, other in zip(ranks, others, strict=True):
                self._mirror[rank] = other

    def plan(self, step: Step, label: str) -> Plan:
        """The plan of a step.

        Where a plan of the same step was made, or of one with the order of the stages reversed, its schedule is used
        again. Then nothing needs to be balanced.
        """
        num_stages = len(self._stages)
        for of_stages, servers in ((step, self._identity), (step[::-1], self._mirror)):
            if of_stages not in self._made or not _are_alike(servers, self._options):
                continue
            like, order = self._made[of_stages]
            if servers is self._mirror:
                order = [num_stages - 1 - stage for stage in order]
            with contextlib.suppress(CapacityError):  # mirrored, rows come home in another order of the ranks
                return self._noted(step, order, like.scheduled_alike, servers, label)
        return self._noted(step, list(range(num_stages)), self._planned, step, label)

    def _noted(self, step: Step, order: list[int], make: Callable[..., Plan], *how: Any) -> Plan:
        """Makes a plan of the layout that has the stages' documents in that order, and keeps the first of each kind."""
        parts = [(part, self._stages[stage]) for stage in order if (part := step[stage]) is not None]
        layout = Layout.join([(self._layout_of(part), ranks) for part, ranks in parts], num_ranks=len(self._identity))
        made = make(layout, *how)
        self._made.setdefault(step, (made, order))
        return made

    def _layout_of(self, part: StageStep) -> Layout:
        """The documents of a stage's step; where its layer attends in chunks, each chunk is one."""
        whole = self._layouts[part.microbatch]
        if part.chunk is None:
            return whole
        key = part.microbatch, part.chunk
        if key not in self._chunked:
            self._chunked[key] = whole.chunked(part.chunk.rows)
        return self._chunked[key]

    def _planned(self, layout: Layout, step: Step, label: str) -> Plan:
        parts = [part for part in step if part is not None]
        options = self._options if self._across_stages else {**self._options, "tasks": self._inside_stages(step)}
        return self._scored(layout, parts, label=label, **options)

    def _scored(self, layout: Layout, parts: list[StageStep], **options: Any) -> Plan:
        """The plan of a layout that has the documents of these parts, one after the other."""
        first = parts[0].scores if parts else Scores()
        if all(part.scores == first for part in parts) and first.scale is None and first.softcap is None:
            return plan_of(layout, mask=first.mask, window=first.window, **options)
        scores = [part.scores for part in parts for _ in self._layout_of(part).document_lengths]
        return plan_of(layout, scores=ScoresOfDocuments(scores, otherwise=first), **options)

    def _inside_stages(self, step: Step) -> list[tuple[int, ...]]:
        """The tasks of a step, of each stage as if it were alone."""
        here = self._options.get("context")
        context = None if here is None else find_context(here)
        of_all = {"context", "rank", "servers", "speeds", "ranks_per_node", "capacity"}
        options = {name: value for name, value in self._options.items() if name not in of_all}
        if context is not None:
            options.setdefault("cost", context.cost)
        tasks: list[tuple[int, ...]] = []
        documents = 0
        for part, ranks in zip(step, self._stages, strict=True):
            if part is None:
                continue
            layout = self._layout_of(part)
            tasks += [
                (documents + task.document, *_ranges(task), ranks[task.server])
                for task in self._scored(layout, [part], **options).tasks
            ]
            documents += len(layout.document_lengths)
        return tasks


def _ranges(task: Task) -> tuple[int, int, int, int]:
    return task.q_begin, task.q_end, task.kv_head_begin, task.kv_head_end


def _are_alike(servers: list[int], options: dict[str, Any]) -> bool:
    """Whether ranks that take each other's places have the same speed, both serve or neither, and nodes stay nodes."""
    speeds, given, ranks_per_node = (options.get(name) for name in ("speeds", "servers", "ranks_per_node"))
    if speeds is not None and any(speeds[rank] != speeds[other] for rank, other in enumerate(servers)):
        return False
    if given is not None and any((rank in given) != (other in given) for rank, other in enumerate(servers)):
        return False
    if ranks_per_node is None:
        return True
    nodes: dict[int, set[int]] = {}
    for rank, other in enumerate(servers):
        nodes.setdefault(rank // ranks_per_node, set()).add(other // ranks_per_node)
    return all(len(of_node) == 1 for of_node in nodes.values())
