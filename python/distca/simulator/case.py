"""What is simulated, and what a strategy makes of it: a program that homes run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from distca.arguments import is_whole, listed
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.planner.layout import Layout
from distca.simulator.dense import Dense, dense_of, optimizer_seconds
from distca.simulator.machine import Machine
from distca.simulator.network import Traffic
from distca.simulator.passes import ShardedWeights
from distca.simulator.setup import Cluster, Model, Parallelism

#: Lengths of documents by micro-batch and home.
Documents = list[list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is simulated.

    Attributes:
        documents: for each micro-batch, for each home of a stage, the lengths of its documents.
        cluster, model, parallelism: what they run on.
        tolerance: that of distca's plans.
    """

    documents: Documents
    cluster: Cluster
    model: Model
    parallelism: Parallelism
    tolerance: float = 0.05

    @property
    def heads(self) -> Heads:
        """The heads of one tensor rank."""
        return self.model.heads.divided(self.parallelism.tensor)

    def layouts(self, cut: Callable[[list[int], int], Layout]) -> list[Layout]:
        """For each micro-batch its rows: the documents of each context parallel group cut over its ranks.

        Args:
            cut: the layout of documents with these lengths on so many ranks.
        """
        context = self.parallelism.context
        layouts = []
        for micro_batch in self.documents:
            parts = []
            for first in range(0, len(micro_batch), context):
                lengths = [n for of_home in micro_batch[first : first + context] for n in of_home]
                parts.append((cut(lengths, context), list(range(first, first + context))))
            layouts.append(Layout.join(parts, num_ranks=len(micro_batch)))
        return layouts

    @property
    def stages(self) -> list[list[int]]:
        """The homes of each stage."""
        homes = self.parallelism.homes
        return [[stage * homes + home for home in range(homes)] for stage in range(self.parallelism.pipeline)]

    @property
    def num_homes(self) -> int:
        """Homes of all stages."""
        return self.parallelism.homes * self.parallelism.pipeline

    @property
    def per_node(self) -> int:
        """Homes of a node."""
        return min(self.cluster.ranks_per_node, self.cluster.ranks) // self.parallelism.tensor

    @property
    def lengths(self) -> list[int]:
        """The lengths of all documents."""
        return [n for micro_batch in self.documents for of_home in micro_batch for n in of_home]

    @property
    def stage_layers(self) -> int:
        """Layers of a stage."""
        return self.model.layers // self.parallelism.pipeline

    def dense(self, rows: list[int]) -> Dense:
        """The dense parts of a layer, for the rows of every home of all stages."""
        return dense_of(rows, self.cluster, self.model, self.parallelism)

    def on_stage(self, layout: Layout, stage: int) -> list[int]:
        """The rows of every home of all stages, if one stage has this layout and the others have nothing."""
        rows = [0] * self.num_homes
        for index, home in enumerate(self.stages[stage]):
            rows[home] = layout.num_rows(index)
        return rows

    def handed_over(self, rows: list[int], to: list[int | None]) -> Traffic:
        """Activations of a layer of so many rows that each home hands to another one."""
        matrix = torch.zeros(self.num_homes, self.num_homes, dtype=torch.float64)
        for home, target in enumerate(to):
            if target is not None:
                matrix[home, target] = (
                    rows[home] * self.model.hidden * self.model.number_bytes / self.parallelism.tensor
                )
        return Traffic.of(matrix, self.per_node)

    @property
    def stage_weights(self) -> float:
        """Numbers in the weights of a tensor rank; of the stages with embedding or logits, which have most."""
        ends = self.model.head_weights * (2 if self.parallelism.pipeline == 1 else 1)
        return (self.stage_layers * self.model.layer_weights + ends) / self.parallelism.tensor

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients (fp32) and optimizer (two moments and a copy, fp32) of a rank.

        The optimizer is sharded over data and context ranks. With FSDP all is, and what is not in layers is whole
        besides, from forward to backward.
        """
        sharded = self.model.number_bytes + 4 + 12
        if self.parallelism.fsdp:
            return self.stage_weights * sharded / self.parallelism.homes + self.ends_bytes
        optimizer = 12 / self.parallelism.homes if self.parallelism.shard_optimizer else 12
        return self.stage_weights * (self.model.number_bytes + 4 + optimizer)

    def activation_bytes(self, rows: int, in_flight: float) -> float:
        """Bytes that a rank keeps of `in_flight` micro-batches of so many rows on its stage, without logits."""
        model, tensor = self.model, self.parallelism.tensor
        heads = model.head_dim * (2 * model.q_heads + 2 * model.kv_heads)
        whole = model.number_bytes * (4 * model.hidden + heads + 3 * model.intermediate) / tensor
        layers = self.stage_layers
        if self.parallelism.recompute:
            kept = model.number_bytes * model.hidden
            if self.parallelism.save_attention:
                kept += model.q_heads * (model.head_dim * model.number_bytes + 4)  # out and log-sum-exp
            return rows * (in_flight * layers * kept / tensor + whole)
        return rows * in_flight * layers * whole

    def sharded_weights(self, *, kept: bool) -> ShardedWeights | None:
        """The weights of FSDP; None without it."""
        if not self.parallelism.fsdp:
            return None
        layer_bytes = self.model.layer_weights * self.model.number_bytes / self.parallelism.tensor
        return ShardedWeights(torch.tensor(self.stages), layer_bytes, self.ends_bytes, kept=kept)

    @property
    def ends_bytes(self) -> float:
        """Bytes of the embedding and of the matrix that makes logits on a tensor rank."""
        return 2 * self.model.head_weights * self.model.number_bytes / self.parallelism.tensor

    def finish(self, machine: Machine) -> None:
        """Reduces gradients and takes the step of the optimizer; sharded gradients are reduced already."""
        machine.phase = "backward"
        sharded = self.parallelism.shard_optimizer or self.parallelism.fsdp
        if not self.parallelism.fsdp:
            groups, number_bytes = torch.tensor(self.stages), self.model.number_bytes
            # fp32 gradients are reduced to their shards, and new weights gathered; or gradients are added up.
            rings = [("reduce_scatter", 4), ("all_gather", number_bytes)]
            for what, num_bytes in rings if sharded else [("all_reduce", number_bytes)] * 2:
                machine.wait_until(machine.network.ring(groups, machine.now, self.stage_weights * num_bytes, what))
        weights = self.stage_weights / (self.parallelism.homes if sharded else 1)
        machine.optimize(optimizer_seconds(weights, self.cluster, self.model))


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most.

    Attributes:
        states: weights, gradients, optimizer.
        activations: what is kept from forward to backward.
        buffers: distca's heap, gathered keys, or whole weights.
    """

    states: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.activations + self.buffers


class Program(Protocol):
    """What a strategy has the homes do, with plans and work made once."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """The rows of every home of a stage, for each micro-batch."""

    @property
    def memory(self) -> Memory:
        """The memory of the rank that needs most."""

    def play(self, machine: Machine) -> None:
        """Runs a training step on a machine."""


class Strategy(Protocol):
    """A way to share the attention of documents among ranks.

    Attributes:
        name: its name in tables and options.
        about: one line that says what it does.
        cuts: whether it cuts documents over context ranks. Otherwise these ranks are data ranks.
        keeps_rows: whether a rank keeps the activations of its share of a micro-batch, or of fewer rows.
    """

    name: str
    about: str
    cuts: bool = True
    keeps_rows: bool = True

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """Whether it can run in this parallelism, and differs there from the others in so many steps."""
        return parallelism.chunks == 1

    def prepare(self, case: Case) -> Program:
        """Plans a step."""

    def prepare_steps(self, cases: Sequence[Case]) -> list[Program]:
        """Plans several steps, which differ in their documents alone. A strategy may move documents between them."""
        return [self.prepare(case) for case in cases]


def as_documents(given: object) -> Documents:
    """Lists of lengths by micro-batch and home. Raises InvalidArgumentError for anything else."""
    expected = "for each micro-batch, for each rank, a list of lengths"
    documents = [
        [
            listed("simulate", "documents of a rank", of_home, expected)
            for of_home in listed("simulate", "a micro-batch", of, expected)
        ]
        for of in listed("simulate", "documents", given, expected)
    ]
    for length in (n for micro_batch in documents for of_home in micro_batch for n in of_home):
        if not is_whole(length, 1, 2**31):
            raise InvalidArgumentError(f"simulate: a document has length {length!r}; 1 to 2^31 are allowed")
    return documents


def check_documents(documents: Documents, parallelism: Parallelism) -> None:
    """Raises InvalidArgumentError unless there are documents for every micro-batch and home."""
    if len(documents) != parallelism.micro_batches:
        raise InvalidArgumentError(
            f"simulate: documents of {len(documents)} micro-batches; the parallelism has {parallelism.micro_batches}"
        )
    for number, micro_batch in enumerate(documents):
        if len(micro_batch) != parallelism.homes:
            raise InvalidArgumentError(
                f"simulate: micro-batch {number} has documents of {len(micro_batch)} ranks; data x context is "
                f"{parallelism.homes}"
            )
    if not any(of_home for micro_batch in documents for of_home in micro_batch):
        raise InvalidArgumentError("simulate: there are no documents")
