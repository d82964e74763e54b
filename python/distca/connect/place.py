"""Where a process is in its job: the ranks of its context, and the stages of a pipeline among them.

With tensor parallelism a process computes a part of the heads. Its context has all processes with the same part: those
with the same rank in their tensor groups. Attention of different contexts never mixes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distca.connect.exchange import gather_text
from distca.errors import DistcaError, InvalidArgumentError, PeerTimeoutError


@dataclass(frozen=True)
class Place:
    """A process's place in its job.

    Attributes:
        global_ranks: the global rank of each rank of the context.
        stages: for each stage of the pipeline its ranks in the context; one stage without a pipeline.
        tensor_rank: this process's rank among the processes that share the heads of a layer.
        contexts: for each tensor rank the global ranks of its context.
    """

    global_ranks: list[int]
    stages: list[list[int]]
    tensor_rank: int = 0
    contexts: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of_group(group: dist.ProcessGroup | None) -> Place:
        """The place of a process whose context has the ranks of a group. None stands for this process alone."""
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        return Place(ranks, [list(range(len(ranks)))])

    @property
    def tensor_ranks(self) -> int:
        """Number of processes that share the heads of a layer."""
        return max(len(self.contexts), 1)

    @property
    def is_of_all(self) -> bool:
        """Whether the context's ranks are the global ranks."""
        return self.global_ranks == list(range(len(self.global_ranks)))

    @contextmanager
    def group(self, timeout: float) -> Iterator[dist.ProcessGroup]:
        """A process group of the context's ranks, for as long as they connect. All processes make those of all."""
        limit = timedelta(seconds=timeout)
        try:
            made = [dist.new_group(list(ranks), timeout=limit) for ranks in self.contexts]
        except RuntimeError as error:
            raise PeerTimeoutError(f"init: the processes could not make the groups of all contexts: {error}") from error
        group = made[self.tensor_rank]
        try:
            yield group
        finally:
            dist.destroy_process_group(group)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Adds the global ranks to the errors that ranks meet while they connect, unless all ranks are global ones."""
        try:
            yield
        except DistcaError as error:
            if not self.is_of_all:
                error.args = (f"{error}; rank r of this context is global rank {_in_words(self.global_ranks)}[r]",)
            raise


def _in_words(ranks: list[int]) -> str:
    """The ranks as Python writes a range, if they are one, and otherwise as a list."""
    if len(ranks) > 2 and ranks[1] > ranks[0]:
        alike = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if list(alike) == ranks:
            return str(alike)
    return str(ranks)


def group_of(name: str, given: Any) -> dist.ProcessGroup | None:
    """The process group of an argument of `distca.init`."""
    if given is None:
        return None
    if isinstance(given, dist.DeviceMesh):
        if given.ndim != 1:
            names = given.mesh_dim_names or ("tp",)
            raise InvalidArgumentError(
                f"init: {name} is a mesh of {given.ndim} dimensions; one of them is expected, such as "
                f"mesh[{names[-1]!r}]"
            )
        given = given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"init: {name} is a {type(given).__name__}; a torch.distributed.ProcessGroup, or a DeviceMesh of one "
            f"dimension, is expected, such as mesh['tp']"
        )
    return given


def place_of(tensor: dist.ProcessGroup | None, pipeline: dist.ProcessGroup | None, timeout: float) -> Place:
    """This process's place. It is collective over all processes.

    Args:
        tensor: the processes that share the heads of a layer with this one; None: this one has all heads.
        pipeline: the processes of this one's pipeline, in the order of the stages; None: there is no pipeline.
        timeout: seconds to wait for the other processes.

    Raises:
        InvalidArgumentError: on all processes, if the groups do not cut them into equal parts.
        PeerDiedError, PeerTimeoutError: a process has gone, or does not come.
    """
    here = dist.get_rank()
    # Processes that give init none of these groups read the problem (agreement.py).
    problem = "this rank gives tensor_parallel or pipeline_parallel, and others do not; give them on all ranks"
    mine = {"tensor": _seat(tensor), "pipeline": _seat(pipeline), "problem": problem}
    told = [json.loads(text) for text in gather_text(json.dumps(mine), _world(), timeout)]
    without = next((rank for rank, seats in enumerate(told) if "tensor" not in seats), None)
    if without is not None and told[without].get("slot_bytes") == 0:  # terms of a rank that was refused
        raise InvalidArgumentError(f"init: global rank {without}: {told[without]['problem']}")
    if without is not None:
        raise InvalidArgumentError(
            f"init: rank {here} gives tensor_parallel or pipeline_parallel, and rank {without} does not; give them on "
            "all ranks"
        )
    tensor_groups = _groups("tensor_parallel", [seats["tensor"] for seats in told])
    pipelines = _groups("pipeline_parallel", [seats["pipeline"] for seats in told])
    contexts = tuple(zip(*tensor_groups, strict=True))
    tensor_rank_of = {rank: number for number, ranks in enumerate(contexts) for rank in ranks}
    for pipe in pipelines:
        if len({tensor_rank_of[rank] for rank in pipe}) > 1:
            raise InvalidArgumentError(
                f"init: pipeline_parallel: the pipeline of global ranks {pipe} has processes of several tensor ranks; "
                "the processes of a pipeline have the same rank in their tensor groups"
            )
    ranks = list(contexts[tensor_rank_of[here]])
    own = [pipe for pipe in pipelines if pipe[0] in ranks]
    stages = [[ranks.index(rank) for rank in of_stage] for of_stage in zip(*own, strict=True)]
    return Place(ranks, stages, tensor_rank_of[here], contexts)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _seat(group: dist.ProcessGroup | None) -> list[int]:
    """The first process of the group, this process's rank in it, and the number of its processes."""
    if group is None:
        return [dist.get_rank(), 0, 1]
    return [dist.get_global_rank(group, 0), dist.get_rank(group), dist.get_world_size(group)]


def _groups(name: str, seats: Sequence[Sequence[int]]) -> list[list[int]]:
    """The global ranks of each group, as the seats of all processes say. Every process is in one of them."""
    groups: dict[int, dict[int, int]] = {}
    for rank, (first, number, size) in enumerate(seats):
        if size != seats[0][2]:
            raise InvalidArgumentError(
                f"init: {name} has {seats[0][2]} processes on global rank 0 and {size} on global rank {rank}; groups "
                "of one size are expected"
            )
        groups.setdefault(first, {})[number] = rank
    for first, members in sorted(groups.items()):
        if sorted(members) != list(range(seats[0][2])):
            raise InvalidArgumentError(
                f"init: {name}: the group of global rank {first} has {seats[0][2]} processes, and global ranks "
                f"{sorted(members.values())} give it; every process gives the one group that it is in"
            )
    return [[members[number] for number in sorted(members)] for _, members in sorted(groups.items())]
