"""A step of distca: real plans of every tick, in a single stream or in ping-pong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from distca.pipeline import PipelinePlans
from distca.pipeline.tick_table import Tick
from distca.planner.halves import halves
from distca.planner.layout import Layout
from distca.planner.plan import Plan
from distca.simulator.case import Case, Memory
from distca.simulator.machine import Machine
from distca.simulator.passes import LayerWork, run_pass
from distca.simulator.work import AttentionWork, attention_work


def packed(case: Case) -> list[Layout]:
    """For each micro-batch its rows: the documents of each context parallel group one after another over its ranks.

    All ranks of a group have equally many rows. Without context ranks documents stay whole.
    """

    def cut(lengths: list[int], ranks: int) -> Layout:
        each = max(1, -(-sum(lengths) // ranks))
        return Layout.packed(lengths, ranks=ranks, tokens_per_rank=each)

    return case.layouts(cut)


class Ticking:
    """The program of distca. Without a pipeline a tick is a forward or backward of a micro-batch.

    Args:
        case: what is simulated.
        ping_pong: whether two halves of each micro-batch take turns.
        layouts: for each micro-batch its rows over the homes of a stage; by default `packed`.
        options: further arguments of `distca.plan`.
    """

    def __init__(
        self,
        case: Case,
        *,
        ping_pong: bool,
        layouts: Sequence[Layout] | None = None,
        **options: Any,
    ) -> None:
        self.case = case
        self.layouts = layouts = packed(case) if layouts is None else layouts
        parallelism = case.parallelism
        self.plans = PipelinePlans(
            layouts,
            case.heads,
            stages=case.stages,
            layers=case.stage_layers // parallelism.chunks,
            chunks=parallelism.chunks,
            halves=[halves(layout) for layout in layouts] if ping_pong else None,
            cost=case.cluster.device.cost(),
            tolerance=case.tolerance,
            ranks_per_node=case.per_node,
            **options,
        )
        self._attention: dict[tuple[object, ...], AttentionWork] = {}
        self._work: dict[tuple[int, int | None], LayerWork] = {}

    @property
    def memory(self) -> Memory:
        """The memory of the rank that needs most."""
        memory = self.memory_without_arenas
        return dataclasses.replace(memory, buffers=memory.buffers + 2 * self.slot_bytes)

    @property
    def memory_without_arenas(self) -> Memory:
        """The same without the arenas of both slots."""
        case, table = self.case, self.plans.table
        rows = max(layout.num_rows(home) for layout in self.plans.layouts for home in range(layout.num_ranks))
        in_flight = max(table.in_flight(stage) for stage in range(table.stages)) / table.chunks
        kept = self.plans.halves is not None and case.parallelism.fsdp
        whole = (
            case.model.layers * case.model.layer_weights * case.model.number_bytes / case.parallelism.tensor
            if kept
            else 0.0
        )
        return Memory(case.state_bytes, case.activation_bytes(rows, in_flight), whole)

    @property
    def slot_bytes(self) -> float:
        """Bytes of the largest arena of a slot."""
        return self.plans.stats.slot_bytes

    def plan_of(self, tick: int, part: int | None) -> Plan:
        """The plan of a layer of a tick, or of one half of it."""
        return self.plans.plan(tick, 0, part)

    def work_of(self, tick: int, part: int | None) -> LayerWork:
        """The work of all homes in a layer of a tick, or in one half of it."""
        if (tick, part) not in self._work:
            self._work[tick, part] = self._new_work(tick, part)
        return self._work[tick, part]

    def _new_work(self, tick: int, part: int | None) -> LayerWork:
        case, plan = self.case, self.plan_of(tick, part)
        of_tick = self.plans.table[tick]
        rows = [plan.layout.num_rows(home) for home in range(case.num_homes)]
        phases = ["forward"] if of_tick.phase == "forward" else ["backward", "forward"]
        attends_again = case.parallelism.recompute and not case.parallelism.save_attention
        needed = phases if attends_again else phases[:1]
        micro_batches = tuple(work and work.microbatch for work in of_tick.work)
        attention = {phase: self._attention_of(plan, phase, (micro_batches, part, phase)) for phase in needed}
        return LayerWork(case.dense(rows), attention)

    def play(self, machine: Machine) -> None:
        """Runs the ticks, and hands activations over at the end of each."""
        case, plans, table = self.case, self.plans, self.plans.table
        kept = plans.halves is not None
        weights = case.sharded_weights(kept=kept)
        for number, tick in enumerate(table):
            halves = {part: self.work_of(number, part) for part in plans.parts}
            forward = tick.phase == "forward"
            self._end(machine, tick, first=forward)
            run_pass(
                machine,
                tick.phase,
                plans.depth,
                halves,
                recompute=case.parallelism.recompute,
                save_attention=case.parallelism.save_attention,
                weights=weights,
            )
            self._end(machine, tick, first=not forward)
            if case.parallelism.pipeline > 1:
                self._hand_over(machine, number)
        if weights is not None:
            weights.finish(machine)
        case.finish(machine)

    def _attention_of(self, plan: Plan, phase: str, key: tuple[object, ...]) -> AttentionWork:
        if key not in self._attention:
            self._attention[key] = self.attention_of(plan, phase)
        return self._attention[key]

    def attention_of(self, plan: Plan, phase: str) -> AttentionWork:
        """What the homes compute and send in a layer with this plan."""
        return attention_work(plan, phase, self.case.cluster.device, self.case.per_node)

    def _end(self, machine: Machine, tick: Tick, *, first: bool) -> None:
        """The first stage computes the embedding, or the last one logits and loss, in their forward or backward."""
        stage, chunk = (0, 0) if first else (-1, self.plans.table.chunks - 1)
        work = tick.work[stage]
        if work is None or work.chunk != chunk:
            return
        dense = self.case.dense(self.case.on_stage(self.plans.layouts[work.microbatch], stage))
        part = dense.embedding if first else dense.head
        machine.phase = tick.phase
        machine.compute(part if tick.phase == "forward" else part.backward)

    def _hand_over(self, machine: Machine, number: int) -> None:
        """Activations go to the next stage, gradients to the one before."""
        case, table = self.case, self.plans.table
        rows, to = [0] * case.num_homes, list[int | None]([None] * case.num_homes)
        for stage in range(table.stages):
            if table.handed_to(number, stage) is None:
                continue
            neighbour = (stage + (-1 if table[number].phase == "forward" else 1)) % table.stages
            work = table[number].work[neighbour]
            assert work is not None
            for index, home in enumerate(case.stages[neighbour]):
                rows[home] = self.plans.layouts[work.microbatch].num_rows(index)
                to[home] = case.stages[stage][index]
        machine.wait_until(machine.network.send(machine.now, case.handed_over(rows, to)))
