"""NVTX ranges for Nsight Systems: the library's operators, and the steps of a training run. Not yet run on a GPU.

torch.profiler needs none of them: it shows operators under their own names (``distca::dispatch``, ...). Under
``torch.autograd.profiler.emit_nvtx`` Nsight Systems shows them too, with every other operator of torch.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager

import torch

from distca.errors import DeviceError, InvalidArgumentError

VARIABLE = "ENABLE_NSYS"
_NOTHING = contextlib.nullcontext()


def switched_on(variable: str) -> bool:
    """Whether an environment variable is 1. 0, empty and not set mean no.

    Raises:
        InvalidArgumentError: the variable has another value.
    """
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise InvalidArgumentError(f"the environment's {variable} is {text!r}; 1 (on) and 0 (off) are allowed")
    return text == "1"


def wanted(argument: bool | None) -> bool:
    """Whether to make NVTX ranges: what the argument says, or, if it is None, what ``ENABLE_NSYS`` says.

    Raises:
        DeviceError: ranges are wanted, and torch has no NVTX.
    """
    on = switched_on(VARIABLE) if argument is None else argument
    if on:
        try:
            torch.cuda.nvtx.range_push("distca")
            torch.cuda.nvtx.range_pop()
        except RuntimeError as error:
            raise DeviceError(
                f"init: nsys = True (or {VARIABLE}=1) marks ranges by NVTX, which this torch {torch.__version__} does "
                "not have; install one with CUDA, or leave it out"
            ) from error
    return on


def operator_range(operator: str, on: bool) -> AbstractContextManager[object]:
    """A range ``distca::<operator>`` if ranges are `on`; otherwise nothing."""
    if not on:
        return _NOTHING
    return torch.cuda.nvtx.range(f"distca::{operator}")


class Capture:
    """An NVTX range for each step of training, with cudaProfilerStart and cudaProfilerStop around some of the steps.

    ``nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop`` then records those steps alone. The first
    step, which has one-time costs, is left out.

    Args:
        on: whether to do anything.
        num_steps: number of steps to capture.
    """

    def __init__(self, on: bool, num_steps: int) -> None:
        self._on, self._left = on, num_steps
        self._captures = False

    def step(self, next_number: int) -> None:
        """Called between two steps; the next step has this number."""
        if not self._on:
            return
        if self._captures:
            torch.cuda.nvtx.range_pop()
        else:
            torch.cuda.profiler.start()
            self._captures = True
        if self._left == 0:
            return self._stop()
        self._left -= 1
        torch.cuda.nvtx.range_push(f"training step {next_number}")

    def close(self) -> None:
        """Called after the last step."""
        if self._captures:
            torch.cuda.nvtx.range_pop()
            self._stop()

    def _stop(self) -> None:
        torch.cuda.profiler.stop()
        self._on = self._captures = False
