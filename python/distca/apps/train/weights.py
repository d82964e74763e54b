"""Random weights that depend on the seed and on their names alone, whichever process makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from transformers import PreTrainedModel

from distca.errors import InvalidArgumentError


class MatricesOnMeta(TorchFunctionMode):
    """Puts what is made with two dimensions or more on the meta device.

    Vectors and numbers are made as ever, because some modules set theirs only in their constructor.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            found = func(*args, **{**kwargs, "device": "meta"})
            if found.dim() > 1:
                return found
        return func(*args, **kwargs)


@torch.no_grad()
def make_weights(model: PreTrainedModel, seed: int) -> None:
    """Makes the random weights of a model that was made with `MatricesOnMeta`, on the CPU, module by module.

    A module that is left out of the model changes nothing in the others. Therefore each stage of a pipeline makes its
    own, and they are those of the whole model. Buffers, such as rotary frequencies, are made as well.

    Raises:
        InvalidArgumentError: transformers leaves a matrix of the model without values.
    """
    for name, module in reversed(list(model.named_modules())):  # some models change the weights of modules inside
        module._apply(_on_cpu, recurse=False)
        owner = next(one for prefix, one in _models(model) if name.startswith(prefix))
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little"))
        owner._init_weights(module)
    model.tie_weights()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dim() > 1 and tensor.isnan().any():
            raise InvalidArgumentError(
                f"{name} of {type(model).__name__} has no initial values in transformers: give a checkpoint's folder"
            )
    torch.manual_seed(seed)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor
    missing = float("nan") if tensor.is_floating_point() else 0
    return torch.full_like(tensor, missing, device="cpu")


def _models(model: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """The models inside the model by their names, the innermost first. Each knows how its modules begin."""
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, PreTrainedModel)]
    return sorted(found, key=lambda pair: len(pair[0]), reverse=True)
