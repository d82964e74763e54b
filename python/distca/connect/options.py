"""Arguments that `distca.init` and `distca.loopback` share: they are checked and turned into the core's terms."""

from __future__ import annotations

from typing import Any

import torch

from distca import _C
from distca.arguments import check_type, is_number, is_whole
from distca.connect.cpu_kernels import CpuKernels
from distca.errors import DeviceError, InvalidArgumentError
from distca.heads import LayerHeads, shapes_of
from distca.planner.cost import CostModel
from distca.planner.memory import SLOTS, default_heap_bytes

EXTENT_ALIGNMENT = _C.EXTENT_ALIGNMENT
_LEAST_SECONDS, _MOST_SECONDS = 0.001, 1e8  # of a timeout: the core counts milliseconds, and refuses 1e9 seconds


def chosen_attention(attention: str | None, device: str, heads: LayerHeads) -> str:
    """What computes attention over these heads, ``"own"`` or ``"flash"``, by an argument or else the environment.

    It computes all layers. If only some have heads that suit the own kernels, `attention_problem` names the others.
    """
    if not (attention is None or isinstance(attention, str)):
        raise InvalidArgumentError(f"init: attention = {attention!r}; 'own', 'flash' or 'auto' is expected")
    choices = {_C.chosen_attention(attention, device, *shape.numbers) for shape in shapes_of("init", heads)}
    return "own" if "own" in choices else "flash"


def attention_problem(device: str, attention: str, heads: LayerHeads) -> str:
    """Why the own kernels, if they are chosen, cannot compute these heads on this device; empty if they can."""
    if device == "cpu" or attention != "own":
        return ""
    number = int(device.removeprefix("cuda:"))
    problems = (_C.own_attention_problem(*shape.numbers, number) for shape in shapes_of("init", heads))
    problem = next(filter(None, problems), "")
    return problem and f"attention = 'own': {problem}"


def cpu_kernels(device: str) -> tuple[CpuKernels | None, str]:
    """What the CPU's kernel can use, None on a GPU, and why there is no kernel; the latter is empty if it is there."""
    try:
        return (CpuKernels.here() if device == "cpu" else None), ""
    except InvalidArgumentError as error:
        return None, str(error)


def device_name(device: torch.device | str) -> str:
    """``"cpu"``, or ``"cuda:"`` and the number of a device that is there. Raises an error for any other device."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"init: device = {device!r}; {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"init: device = {str(device)!r}; cpu and cuda are supported")
    if device.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise DeviceError(f"init: device = {str(device)!r}, but PyTorch finds no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"init: device = {str(device)!r}; there are {torch.cuda.device_count()}")
    return f"cuda:{index}"


def is_timeout(timeout: Any) -> bool:
    """Whether this is a timeout that contexts take, in seconds."""
    return is_number(timeout, _LEAST_SECONDS, _MOST_SECONDS)


def core_options(slot_bytes: int, timeout: float, cost: CostModel) -> dict[str, Any]:
    """The arguments that every transport's constructor in ``_C`` takes."""
    if not is_timeout(timeout):
        raise InvalidArgumentError(
            f"init: timeout = {timeout!r}; a number of seconds from {_LEAST_SECONDS} to {_MOST_SECONDS:.0e} is expected"
        )
    check_type("init", "cost", cost, CostModel, 'distca.CostModel.load("pairs")')
    return {
        "slot_bytes": slot_bytes,
        "timeout": float(timeout),
        "cost": cost.core,
    }


def slot_bytes_of(max_tokens: int, heads: LayerHeads, heap_bytes: int | None) -> int:
    """Bytes of one slot of the heap that is asked for, or of the default one."""
    if not is_whole(max_tokens, 1):
        raise InvalidArgumentError(f"init: max_tokens = {max_tokens!r}; an integer from 1 on is expected")
    largest = shapes_of("init", heads)[0]
    if heap_bytes is None:
        heap_bytes = default_heap_bytes(max_tokens, largest)
        if not is_whole(heap_bytes, 1):
            raise InvalidArgumentError(
                f"init: max_tokens = {max_tokens}; a heap for so many rows of these heads has {heap_bytes} bytes, more "
                "than can be addressed: give fewer tokens, or heap_bytes"
            )
    if not is_whole(heap_bytes, 1):
        raise InvalidArgumentError(f"init: heap_bytes = {heap_bytes!r}; a number of bytes is expected")
    slot_bytes = heap_bytes // SLOTS // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
    if slot_bytes <= 0:
        raise InvalidArgumentError(f"init: heap_bytes = {heap_bytes}; at least {SLOTS * EXTENT_ALIGNMENT} are needed")
    return slot_bytes
