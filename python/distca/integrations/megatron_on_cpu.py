"""Lets Megatron-core run on CPU ranks, which it does not do by itself. Nothing loads this where a GPU is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_SET_STATE = "_set_main_param_and_optimizer_states"


class _CudaIsCpu(TorchFunctionMode):
    """Makes tensors for "cuda" on the CPU, and lets CPU tensors say that they are on CUDA where Megatron asks."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


@contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """In `with`, Megatron-core runs on the CPU."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    changes: list[Any] = [
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        mock.patch.object(torch.cuda, "stream", lambda *_: nullcontext()),
        mock.patch.object(torch.cuda, "Stream", mock.MagicMock()),
        mock.patch.object(torch.cuda, "current_stream", mock.MagicMock()),
        mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        mock.patch.object(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        mock.patch.object(
            DistributedOptimizer, _SET_STATE, _without_step(getattr(DistributedOptimizer, _SET_STATE)), create=True
        ),
        # 0.16.1 asks for it, and has it with Transformer Engine only.
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
    ]
    for change in changes:
        change.start()
    try:
        with _CudaIsCpu():
            yield
    finally:
        for change in changes:
            change.stop()


def _without_step(set_state: Any) -> Any:
    """Sets what a checkpoint has of a parameter's state. On the CPU PyTorch's Adam replaces that of Transformer Engine.
    It also has a number of steps for each parameter, which Megatron has set before, to one tensor for all of them.
    """

    def run(self: Any, model_parameter: Any, tensors: Any) -> None:
        group, number = self.model_param_group_index_map[model_parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][number]]
        step = state.pop("step")
        set_state(self, model_parameter, tensors)
        state["step"] = step.clone()

    return run
