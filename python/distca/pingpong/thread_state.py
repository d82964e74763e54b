"""Torch's thread-local state, taken from a thread and put back: what a switch between two halves must exchange.

It covers grad mode, autocast, saved-tensor hooks (activation checkpointing), the stacks of function and dispatch modes,
and the states of the random generators. Inference mode cannot be switched. Contexts that a half enters therefore hold
for that half alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]

#: Globals of torch.utils._python_dispatch that dispatch modes set on entry and restore on exit.
_MODE_FLAGS = tuple(
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)
)


@dataclass
class Random:
    """States of the generators from which operators draw by default."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @classmethod
    def now(cls) -> Random:
        """The current states; those of CUDA only if it is in use."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda)

    def other(self) -> Random:
        """States of new generators that are seeded from these."""
        generator = torch.Generator()
        generator.set_state(self.cpu)
        seed = int(torch.randint(2**62, (), generator=generator))
        cuda = [torch.Generator(f"cuda:{i}").manual_seed(seed).get_state() for i in range(len(self.cuda))]
        return Random(torch.Generator().manual_seed(seed).get_state(), cuda)

    def advanced(self) -> Random:
        """These states after one more number was drawn on the CPU, so that `other` seeds others from them."""
        generator = torch.Generator()
        generator.set_state(self.cpu)
        torch.randint(2**62, (), generator=generator)
        return Random(generator.get_state(), self.cuda)

    def restore(self) -> None:
        """Puts the states back."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@dataclass
class ThreadState:
    """What torch keeps for a thread at one moment. `now` takes it, `restore` puts it back."""

    grad: bool
    forward_grad: bool
    autocast: list[tuple[str, bool, torch.dtype]]
    autocast_cache: bool
    autocast_depth: int
    hooks: list[_Hooks]
    hooks_disabled: str | None
    function_modes: list[Any]
    dispatch_modes: list[Any]
    mode_flags: list[bool]
    random: Random

    @classmethod
    def now(cls) -> ThreadState:
        """The state of this thread, which is not changed."""
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        return cls(
            grad=torch.is_grad_enabled(),
            forward_grad=torch._C._is_fwd_grad_enabled(),
            autocast=[(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices],
            autocast_cache=torch.is_autocast_cache_enabled(),
            autocast_depth=_autocast_depth(),
            hooks=_hooks(),
            hooks_disabled=torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
            function_modes=_function_modes(),
            dispatch_modes=_dispatch_modes(),
            mode_flags=[getattr(_python_dispatch, name) for name in _MODE_FLAGS],
            random=Random.now(),
        )

    def restore(self) -> None:
        """Puts the thread back into this state."""
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_grad)
        self._restore_autocast()
        self._restore_hooks()
        if (modes := _function_modes()) != self.function_modes:
            for _ in modes:
                torch._C._pop_torch_function_stack()
            for mode in self.function_modes:
                torch._C._push_on_torch_function_stack(mode)
        if (modes := _dispatch_modes()) != self.dispatch_modes:
            for _ in modes:
                torch._C._pop_torch_dispatch_stack(None)
            for mode in self.dispatch_modes:
                torch._C._push_on_torch_dispatch_stack(mode)
        for name, flag in zip(_MODE_FLAGS, self.mode_flags, strict=True):
            setattr(_python_dispatch, name, flag)
        self.random.restore()

    def switch_to(self, outer: ThreadState) -> None:
        """Does what `restore` does, for a switch from another half. `outer` is the state in which both halves began.

        It clears autocast's cache of casts if a half is inside an autocast of its own: if the halves came one after the
        other, those casts would be gone when the other half begins. Inside an autocast around both halves they would
        not.
        """
        own_casts = outer.autocast_depth == 0 and max(_autocast_depth(), self.autocast_depth) > 0
        self.restore()
        if own_casts:
            torch.clear_autocast_cache()

    def _restore_autocast(self) -> None:
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        depth = _autocast_depth()
        for _ in range(self.autocast_depth - depth):
            torch.autocast_increment_nesting()
        for _ in range(depth - self.autocast_depth):
            torch.autocast_decrement_nesting()

    def _restore_hooks(self) -> None:
        autograd = torch._C._autograd
        autograd._saved_tensors_hooks_enable()
        _take_hooks()
        for pack, unpack in self.hooks:
            autograd._push_saved_tensors_default_hooks(pack, unpack)
        if self.hooks_disabled is not None:
            autograd._saved_tensors_hooks_disable(self.hooks_disabled, fail_if_non_empty=False)


def _take_hooks() -> list[_Hooks]:
    """Empties the stack of saved-tensor hooks. Returns what was on it, the first pushed first."""
    taken = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
    return taken[::-1]


def _hooks() -> list[_Hooks]:
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()  # disabled hooks would not show
    hooks = _take_hooks()
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    if disabled is not None:
        torch._C._autograd._saved_tensors_hooks_disable(disabled, fail_if_non_empty=False)
    return hooks


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _dispatch_modes() -> list[Any]:
    """The modes that models enter. torch's own modes (fake tensors, proxies) lie apart and are left out."""
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    return [mode for mode in stack if getattr(mode, "_mode_key", None) is None]
