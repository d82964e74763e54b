"""How the processes of a run share the work: data, tensor and pipeline parallelism."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distca.apps.train.config import TrainConfig


@dataclass(frozen=True)
class Split:
    """The processes of a run, as a mesh of pipeline stages, data ranks and tensor ranks, and this one's place in it.

    Neighbouring ranks are tensor ranks. `torch.distributed` must be initialised.

    Attributes:
        stages, data, tensor: the sizes of the mesh.
        chunks: chunks of layers of each stage.
    """

    stages: int
    data: int
    tensor: int
    chunks: int

    @staticmethod
    def of(config: TrainConfig) -> Split:
        return Split(config.pipeline, config.data_ranks, config.tensor, config.chunks)

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh, with the dimensions pp, dp and tp. Making it is collective."""
        return init_device_mesh("cpu", (self.stages, self.data, self.tensor), mesh_dim_names=("pp", "dp", "tp"))

    @property
    def place(self) -> tuple[int, int, int]:
        """This process's stage, and its ranks among the data and the tensor ranks of the stage."""
        stage, rest = divmod(dist.get_rank(), self.data * self.tensor)
        return stage, *divmod(rest, self.tensor)

    @property
    def stage(self) -> int:
        return self.place[0]

    @property
    def data_rank(self) -> int:
        return self.place[1]

    @property
    def has_first(self) -> bool:
        """Whether this process has the model's first layers."""
        return self.stage == 0

    @property
    def has_last(self) -> bool:
        """Whether this process has the model's last layers."""
        return self.stage == self.stages - 1

    @functools.cached_property
    def ends(self) -> dist.ProcessGroup | None:
        """The processes of this one's place in the first and the last stage; None in the stages between them.

        They are collective. All processes make those of all.
        """
        mine = None
        in_stage = self.data * self.tensor
        for place in range(in_stage):
            ranks = [place, (self.stages - 1) * in_stage + place]
            group = dist.new_group(ranks) if self.stages > 1 else None
            if dist.get_rank() in ranks:
                mine = group
        return mine


def deal_layers(num_layers: int, stages: int, *, chunks: int = 1, layer: float = 1.0, head: float = 0.0) -> list[int]:
    """The layers of each stage's chunks, such that the stage that costs most costs as little as it can.

    Args:
        num_layers: layers of the model, a multiple of `chunks`, and at least one for each chunk of each stage.
        stages: number of stages.
        chunks: chunks of layers of each stage.
        layer: cost of a layer.
        head: cost of the head, which the last stage has as well.
    """
    found = [1] * stages
    for _ in range(num_layers // chunks - stages):
        costs = [chunks * (of_stage + 1) * layer for of_stage in found]
        costs[-1] += head
        found[costs.index(min(costs))] += 1
    return found


def ranges_of(layers: Sequence[int], stage: int, chunks: int) -> list[range]:
    """The layers of each chunk of a stage. A chunk of every stage comes before the next chunk of the first one."""
    begin = sum(layers[:stage])
    return [range(begin + chunk * sum(layers), begin + chunk * sum(layers) + layers[stage]) for chunk in range(chunks)]
