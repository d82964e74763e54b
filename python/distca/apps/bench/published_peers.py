"""Published figures of other systems: WLB-LLM, context parallelism by MagiAttention's measurements, 4D parallelism."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from distca.apps.bench.beside import Beside, scaled_as_published
from distca.apps.common.workloads import pretrain_lengths, read_lengths
from distca.calls import Call
from distca.planner.layout import Layout
from distca.simulator.case import Case, Documents, Program
from distca.simulator.machine import Machine
from distca.simulator.network import Network
from distca.simulator.one_f_one_b import OneForwardOneBackward
from distca.simulator.reading import read_cluster, read_model
from distca.simulator.setup import Model, Parallelism
from distca.simulator.strategies import STRATEGIES
from distca.simulator.strategies.distca_paper import fa2_table
from distca.simulator.strategies.outliers import Packed, pack
from distca.simulator.strategies.wlb import by_sequence, document_work

#: What was published and cannot be put beside the simulator, and why.
NOT_MADE = {
    "ProLong, 3D and 4D": "its list of lengths does not come with distca",
    "4D, the other rows of table 4": "they take long",
    "MagiAttention itself": "it is no strategy of the simulator",
    "WLB-LLM, mean speed-up 1.23": "its four models and clusters are not described by their lengths",
}
#: GPUs, context, and chunks of the context in a batch: table 4 but for a few rows, which take long.
BATCHES_4D = {
    "llama-8b": [
        (64, 131072, 32),
        (64, 262144, 16),
        (64, 524288, 8),
        (128, 131072, 64),
        (128, 262144, 32),
        (128, 524288, 8),
        (256, 524288, 16),
    ],
    "llama-34b": [(128, 131072, 32), (128, 393216, 8), (256, 131072, 64), (512, 393216, 16)],
}
TENSOR = 8
STEPS = 16
#: The model of MagiAttention's measurements has attention alone; the other sizes take no part.
ATTENTION = Model(1, 8192, 8192, 1, q_heads=64, kv_heads=8, head_dim=128)


def figures(said: dict[str, Any], short: bool) -> Iterator[Beside]:
    """All figures, of one draw; `short` leaves out 4D parallelism and clusters of more than 16 GPUs."""
    yield from _wlb(said["wlb"], STEPS // 4 if short else STEPS)
    yield from _magi(said["magi"], 16 if short else 64)
    if short:
        return
    for model, batches in BATCHES_4D.items():
        least, most = (said["speedup_over_ideal_wlb_4d"][model][name] for name in ("least", "most"))
        for gpus, context, chunks in batches:
            times = _times_4d(model, gpus, context, chunks)
            where = f"4D, {model} on {gpus} GPUs, {context // 1024}K"
            over = {name: times[name] / times["released"] for name in ("wlb", "megatron")}
            yield Beside(f"{where}, ideal WLB / released DistCA", least, most, over["wlb"])
            if gpus == 512:
                said_most = said["speedup_over_megatron"]["most"]
                yield Beside(
                    f"{where} (published: 512K), Megatron / released DistCA",
                    said_most,
                    said_most,
                    over["megatron"],
                    base=1.0,
                )


def _wlb(said: dict[str, Any], steps: int) -> Iterator[Beside]:
    """Imbalance and speed-up for a context of 128K, four micro-batches on four stages, two context ranks."""
    shape = Parallelism(context=2, tensor=TENSOR, pipeline=4, micro_batches=4)
    stream = [_sequences(131072, 4, seed) for seed in range(steps)]
    cases = [_case("llama-8b", [[sequence, []] for sequence in of], shape) for of in stream]
    work = document_work(cases[0])
    batches = [case.lengths for case in cases]
    queues = {"with one queue": (65536,), "with two queues": (32768, 65536)}
    packings: dict[str, list[Packed]] = {"as packed": stream}
    packings |= {name: pack(batches, 4, 4 * 131072, work, thresholds) for name, thresholds in queues.items()}
    for (name, packing), value in zip(packings.items(), said["imbalance"]["values"], strict=True):
        imbalance = statistics.mean(_imbalance(step, work) for step in packing)
        yield Beside(f"WLB-LLM, imbalance {name}", value, value, imbalance, base=1.0)
    seconds = [
        sum(_seconds(program, cases[0]) for program in programs)
        for programs in ([_by_sequence(case) for case in cases], STRATEGIES["wlb"].prepare_steps(cases))
    ]
    value = said["speedup"]["value"]
    yield Beside("WLB-LLM, speed-up over plain 4D, 128K", value, value, seconds[0] / seconds[1], base=1.0)


def _imbalance(step: Packed, work: Any) -> float:
    works = [sum(map(work, sequence)) for sequence in step]
    return max(works) / statistics.mean(works)


def _by_sequence(case: Case) -> Program:
    """Plain 4D parallelism: every sequence is cut over its context ranks as a whole, and keys are gathered."""
    context = case.parallelism.context
    layouts = []
    for micro_batch in case.documents:
        parts = [
            (by_sequence(micro_batch[first], context), list(range(first, first + context)))
            for first in range(0, len(micro_batch), context)
        ]
        layouts.append(Layout.join(parts, num_ranks=len(micro_batch)))
    return OneForwardOneBackward(case, layouts, gather=context)


def _magi(said: dict[str, Any], most_gpus: int) -> Iterator[Beside]:
    """TFLOP/s a GPU of attention alone. The documents are not published; two kinds are modelled.

    They are those of the published list, none above a quarter of all tokens, and four documents of a quarter each.
    """
    for number, gpus in enumerate(said["gpus"]):
        if gpus > most_gpus:
            continue
        tokens = 8192 * gpus
        kinds = {
            "listed documents": _documents(tokens, tokens // 4, seed=0),
            "four documents": [tokens // 4] * 4,
        }
        for kind, lengths in kinds.items():
            for phase, name in itertools.product(("forward", "backward"), ("all-gather", "ulysses", "hybrid-context")):
                value = said[phase][name][number]
                where = f"{name} on {gpus} GPUs, {kind}, {phase}, TFLOP/s"
                yield Beside(where, value, value, _rate(name, lengths, gpus, phase))


def _rate(name: str, lengths: list[int], gpus: int, phase: str) -> float:
    """TFLOP/s a GPU; backward has 2.5 times the operations of forward."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    flop = (4 if phase == "forward" else 10) * ATTENTION.q_heads * ATTENTION.head_dim * pairs
    return flop / (_attention_seconds(name, lengths, gpus, phase) * gpus * 1e12)


def _attention_seconds(name: str, lengths: list[int], gpus: int, phase: str) -> float:
    shape = Parallelism(context=gpus)
    case = Case([[lengths, *[[]] * (gpus - 1)]], read_cluster("h200-ib400", gpus), ATTENTION, shape)
    program = STRATEGIES[name].prepare(case)
    assert isinstance(program, OneForwardOneBackward)
    machine = Machine(Network(case.cluster, 1), case.cluster.device)
    call = Call("core_attention", phase, 0)
    for number in range(len(program.layouts)):
        gathered = program.gathered(number, 0)
        if gathered is not None and phase == "forward":
            machine.wait_until(machine.network.ring(gathered.groups, machine.now, gathered.forward_bytes, "all_gather"))
        step = machine.dispatch(program.attention(number, 0)[phase], call)
        machine.attend(step, call)
        machine.collect(step, call)
        if gathered is not None and phase == "backward":
            num_bytes = gathered.backward_bytes
            machine.wait_until(machine.network.ring(gathered.groups, machine.now, num_bytes, "reduce_scatter"))
        machine.wait_until(machine.now.max().expand_as(machine.now))
    return float(machine.now.max())


def _times_4d(model: str, gpus: int, context: int, chunks: int) -> dict[str, float]:
    """Seconds of a step of each system at its best parallelism, attention at the rates of FlashAttention-2.

    Memory is no limit, because nothing is said of recomputation.
    """
    sequences = _sequences(context, chunks, seed=0)
    homes = gpus // TENSOR

    def best(name: str, contexts: Sequence[int]) -> float:
        """Of these numbers of context ranks, with and without a pipeline of two stages."""
        times = []
        for of_context, pipeline in itertools.product(contexts, (1, 2)):
            data = homes // of_context // pipeline
            if data == 0 or chunks % data:
                continue
            shape = Parallelism(data, of_context, TENSOR, pipeline, micro_batches=chunks // data)
            empty: list[list[int]] = [[]] * (of_context - 1)
            documents = [
                [of_home for sequence in sequences[first : first + data] for of_home in [sequence, *empty]]
                for first in range(0, chunks, data)
            ]
            case = _case(model, documents, shape, fa2=True)
            program = _by_sequence(case) if name == "plain" else STRATEGIES[name].prepare(case)
            times.append(_seconds(program, case))
        return min(times)

    # The fewest context ranks that leave every data rank a chunk.
    fewest = next(context for context in (1, 2, 4, 8) if chunks % (homes // context) == 0)
    return {
        "released": best("distca-paper", [fewest]),
        "wlb": best("wlb-no-delay", [fewest, 2 * fewest]),
        "megatron": best("plain", [fewest, 2 * fewest, 4 * fewest]) if gpus == 512 else 0.0,
    }


def _case(model: str, documents: Documents, shape: Parallelism, *, fa2: bool = False) -> Case:
    cluster = read_cluster("h200-ib400", shape.homes * shape.tensor * shape.pipeline)
    if fa2:
        device = dataclasses.replace(cluster.device, attention=fa2_table(), memory=1e15)
        cluster = dataclasses.replace(cluster, device=device)
    return Case(documents, cluster, read_model(model), shape)


def _seconds(program: Program, case: Case) -> float:
    machine = Machine(Network(case.cluster, case.parallelism.tensor), case.cluster.device)
    program.play(machine)
    return float(machine.now.max())


def _sequences(context: int, count: int, seed: int) -> list[list[int]]:
    """So many sequences of `context` tokens, packed in the order of the draw."""
    lengths = scaled_as_published(read_lengths(pretrain_lengths()), context)
    generator = random.Random(seed)
    return [_packed(lengths, context, generator) for _ in range(count)]


def _documents(tokens: int, longest: int, seed: int) -> list[int]:
    """Documents of the published list, none above `longest`, with so many tokens in all."""
    lengths = [min(n, longest) for n in read_lengths(pretrain_lengths())]
    return _packed(lengths, tokens, random.Random(seed))


def _packed(lengths: Sequence[int], tokens: int, generator: random.Random) -> list[int]:
    """Draws until there are so many tokens; the last document is cut."""
    drawn, left = [], tokens
    while left > 0:
        drawn.append(min(generator.choice(lengths), left))
        left -= drawn[-1]
    return drawn
