"""What each rank of `distca verify` does: it computes its rows of problems and returns them."""

from __future__ import annotations

import faulthandler
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from distca.apps.verify.cases import Case, Inputs, random_inputs
from distca.connect.init import init
from distca.context import Context
from distca.errors import DeviceError, DistcaError, InvalidArgumentError, OperatingSystemError
from distca.ops import attention, core_attention
from distca.planner.layout import Layout
from distca.planner.plan import Plan

_GRACE_SECONDS = 15.0  # in which a rank that waits for another one says so itself

#: In the place of a transport: `distca.attention`, the kernel without plan and context.
LOCAL = "local"

#: A rank's rows of out, lse, dq, dk, dv, and the gradient of its sinks if there are some.
Rows: TypeAlias = list[np.ndarray[Any, Any]]
#: These, and the largest logits of its rows, if they were asked for.
Computed: TypeAlias = tuple[Rows, np.ndarray[Any, Any] | None]


class UnavailableError(DistcaError):
    """There are no such ranks here, because something is missing."""


@dataclass
class Returned:
    """What a rank returned for a case, each time that it was computed.

    Backward is deterministic twice, as it always is on the CPU. On CUDA a third one is not.

    Attributes:
        runs: what was returned.
        max_logits: the largest logits, each time; none from ATen's flash attention.
        refusal: why the case was refused, if it was.
        is_fault: whether it had to be taken.
    """

    runs: list[Rows]
    refusal: str = ""
    is_fault: bool = False
    max_logits: list[np.ndarray[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Where:
    """What computes, and how rows travel.

    Attributes:
        device: "cpu" or "cuda". On CUDA, rank r has GPU r, modulo the number of GPUs.
        attention: what computes on a GPU: "own" or "flash".
        transport: as in `distca.init`, or `LOCAL`.
        ranks: the number of ranks.
    """

    device: str
    attention: str
    transport: str
    ranks: int

    @property
    def finds_max_logits(self) -> bool:
        """Whether it tells the largest logits."""
        return self.attention != "flash"

    @property
    def name(self) -> str:
        """In words."""
        what = "cpu" if self.device == "cpu" else f"cuda, {self.attention}"
        how = f"{self.transport}, {self.ranks} ranks" if self.ranks > 1 else "distca.attention"
        return what if self.transport == "loopback" else f"{what}, {how}"


def results_of_rank(where: Where, cases: Sequence[Case], seed: int, timeout: float) -> list[Returned]:
    """What this rank returns for each case."""
    rank = dist.get_rank()
    device = "cpu"
    if where.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = f"cuda:{torch.cuda.current_device()}"
    modes = (True, True) if where.device == "cpu" else (True, True, False)
    if where.transport == LOCAL:
        return [_computed(partial(_local, where, case, seed), modes, where, timeout) for case in cases]
    results = [Returned([]) for _ in cases]
    for heads in dict.fromkeys(case.heads for case in cases):
        chosen = [i for i, case in enumerate(cases) if case.heads == heads]
        plans = [cases[i].plan(where.ranks, seed) for i in chosen]
        heap_bytes = max(2 * max(plan.stats.slot_bytes for plan in plans), 1 << 20)
        try:
            context = init(
                transport=where.transport,
                max_tokens=1,
                heads=heads,
                heap_bytes=heap_bytes,
                timeout=timeout,
                device=device,
                attention=where.attention if where.device == "cuda" else None,
            )
        except InvalidArgumentError as error:
            if where.ranks > 1:
                raise UnavailableError(str(error)) from error
            for i in chosen:
                results[i].refusal = str(error)
            continue
        except (DeviceError, OperatingSystemError) as error:
            raise UnavailableError(str(error)) from error
        with context:
            for i, plan in zip(chosen, plans, strict=True):
                step = partial(_step, where, cases[i], plan.for_rank(rank), context, seed)
                results[i] = _computed(step, modes, where, timeout)
            if device != "cpu":
                torch.cuda.synchronize()
            context.check()
    return results


def _computed(compute: Callable[[bool], Computed], modes: Sequence[bool], where: Where, timeout: float) -> Returned:
    """What `compute` returns in each mode, deterministic or not. The process ends if one takes longer than `timeout`,
    as it does where a kernel hangs. Only ATen's flash attention may refuse a case.
    """
    returned = Returned([])
    try:
        for deterministic in modes:
            faulthandler.dump_traceback_later(timeout + _GRACE_SECONDS, exit=True)
            rows, max_logits = compute(deterministic)
            returned.runs.append(rows)
            if max_logits is not None:
                returned.max_logits.append(max_logits)
    except InvalidArgumentError as error:
        returned.refusal, returned.is_fault = str(error), where.attention != "flash"
    finally:
        faulthandler.cancel_dump_traceback_later()
    return returned


def rows_of_rank(case: Case, layout: Layout, rank: int) -> torch.Tensor:
    """For each row of a rank its number among those of the problem; -1 for padding."""
    rows: list[int] = []
    for document, begin, end in layout.segments(rank):
        first = 0 if document < 0 else sum(case.lengths[:document]) - case.first_row(document)
        rows += [-1] * (end - begin) if document < 0 else range(first + begin, first + end)
    return torch.tensor(rows, dtype=torch.int64)


def _step(where: Where, case: Case, plan: Plan, context: Context, seed: int, deterministic: bool) -> Computed:
    inputs = random_inputs(case, seed)
    rows = rows_of_rank(case, plan.layout, context.rank)

    def local(tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows. Padding is NaN: nothing may depend on it."""
        chosen = tensor[rows.clamp(min=0)]
        chosen[rows < 0] = torch.nan
        return chosen.to(context.device)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        options: dict[str, Any] = {"scale": case.scale, "softcap": case.softcap, "deterministic": deterministic}
        options["max_logits"] = where.finds_max_logits
        return core_attention(q, k, v, plan, context=context, sinks=sinks, **options)

    return _with_gradients(inputs.with_rows(local), attend)


def _local(where: Where, case: Case, seed: int, deterministic: bool) -> Computed:
    """The case by `distca.attention`: rows of documents lie one after another."""
    ends = zip(itertools.accumulate(case.lengths), case.lengths, strict=True)
    tasks = torch.tensor([(end - length, end, end - length, end) for end, length in ends])

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        return attention(
            q,
            k,
            v,
            tasks,
            sinks,
            mask=case.mask,
            window=case.window,
            scale=case.scale,
            softcap=case.softcap,
            attention=where.attention if where.device == "cuda" else None,
            max_logits=where.finds_max_logits,
        )

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        return _with_gradients(random_inputs(case, seed).with_rows(lambda rows: rows.to(where.device)), attend)
    finally:
        torch.use_deterministic_algorithms(before)


def _with_gradients(inputs: Inputs, attend: Callable[..., tuple[torch.Tensor, ...]]) -> Computed:
    """What `attend` returns, and the gradients of its inputs; and the largest logits, if it returns them."""
    q, k, v = (t.requires_grad_() for t in inputs[:3])
    sinks = None if inputs.sinks is None else inputs.sinks.to(q.device).requires_grad_()
    out, lse, *largest = attend(q, k, v, sinks)
    if inputs.dlse is None:
        out.backward(inputs.dout)
    else:
        torch.autograd.backward([out, lse], [inputs.dout, inputs.dlse])
    returned = [out.detach(), lse.detach(), q.grad, k.grad, v.grad, *([] if sinks is None else [sinks.grad])]
    # numpy knows no bf16; fp32 has all its values.
    rows = [t.float().cpu().numpy() for t in returned if t is not None]
    return rows, largest[0].cpu().numpy() if largest else None
