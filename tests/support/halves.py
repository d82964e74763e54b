"""A small model on two halves of a micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import distca
from distca.integrations import hf  # noqa: F401

HEADS = distca.Heads(q=4, kv=2, dim=16)


LENGTHS = ([100, 31, 5, 60], [20, 150, 3])


WIDTH = 64


Halves = list[dict[str, Any]]


class Layer(torch.nn.Module):
    """A residual attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 8 * HEADS.dim)
        self.out = torch.nn.Linear(4 * HEADS.dim, WIDTH)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, plan: distca.Plan, context: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 8, HEADS.dim).split([4, 2, 2], 1)
        out, _ = distca.core_attention(q, k, v, plan, context=context)
        return x + self.dropout(self.out(out.flatten(1)))


class Model(torch.nn.Module):
    """Layers that run in autocast if `cast` says so, and are checkpointed with the options `recompute` if there are
    any.
    """

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(layers)])

    def forward(
        self, x: torch.Tensor, plan: distca.Plan, context: Any = "default", recompute: Any = None, cast: bool = False
    ) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if cast else contextlib.nullcontext():
            for layer in self.layers:
                if recompute is None:
                    x = layer(x, plan, context)
                else:
                    x = checkpoint(layer, x, plan, context, **{"use_reentrant": False} | recompute)
                assert torch.is_autocast_enabled("cpu") == cast
        return x


def seeded(make: Callable[[], Any]) -> Any:
    """A model whose weights come from a generator of their own, because ranks are threads here and ping-pong sets the
    process's generator.
    """
    model, generator = make(), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        # The other weights are those of norms, which always start the same.
        if parameter.dim() > 1 or name.endswith("bias"):
            bound = parameter.shape[-1] ** -0.5
            torch.nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return model


def plans_for(ranks: int, heads: tuple[distca.Heads, distca.Heads] = (HEADS, HEADS)) -> list[distca.Plan]:
    per_rank = max(sum(lengths) for lengths in LENGTHS) // ranks + 1
    layouts = [distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=per_rank) for lengths in LENGTHS]
    return [distca.plan(layout, of, tolerance=0.01) for layout, of in zip(layouts, heads, strict=True)]


def halves_for(plans: list[distca.Plan], context: distca.Context, **both: Any) -> Halves:
    made: Halves = []
    for index, plan in enumerate(plans):
        generator = torch.Generator().manual_seed(10 * index + context.rank)
        x = torch.randn(plan.layout.num_rows(context.rank), WIDTH, generator=generator)
        made.append({"x": x, "plan": plan.for_rank(context.rank), "context": context, **both})
    return made


def one_after_the_other(model: torch.nn.Module, halves: Halves) -> list[Any]:
    return [model(**half) for half in halves]


def ping_pong(model: torch.nn.Module, halves: Halves) -> list[Any]:
    return list(distca.PingPong(model)(*halves))


def results(run: Callable[..., list[Any]], model: torch.nn.Module, halves: Halves) -> dict[str, torch.Tensor]:
    """The outputs, and the gradients of one backward of the sum of both losses."""
    model.zero_grad(set_to_none=True)
    outputs = [getattr(output, "logits", output).float() for output in run(model, halves)]
    (outputs[0].square().sum() + outputs[1].square().sum()).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"first": outputs[0].detach(), "second": outputs[1].detach(), **grads}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different, different
