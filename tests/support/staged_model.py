"""A small model in plain PyTorch that can be cut into pipeline stages, and what one process computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distca

VOCABULARY, HIDDEN, HEADS = 97, 32, distca.Heads(q=4, kv=2, dim=8)
#: [micro-batch][rank of a stage]: 300 tokens each, unequal attention.
DOCUMENTS = [
    [[300], [30] * 10],
    [[100, 200], [150, 150]],
    [[10] * 30, [290, 10]],
    [[60] * 5, [120, 180]],
    [[300], [299, 1]],
    [[20] * 15, [50] * 6],
]

#: attend(q, k, v) -> out, all [rows, heads, dim].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    """Attention and a gated MLP, both with a residual connection.

    Tensor parallelism (tensor_parallel.py) changes `heads`, and what happens where a part begins and ends that has
    weights of this process only: `enter` and `leave`.
    """

    def __init__(self, heads: distca.Heads) -> None:
        super().__init__()
        self.heads = heads
        self.enter = self.leave = nn.Identity()
        self.norms = nn.ModuleList([Norm(), Norm()])
        width = heads.q * heads.dim
        self.q, self.o = nn.Linear(HIDDEN, width, bias=False), nn.Linear(width, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, heads.kv * heads.dim, bias=False) for _ in range(2))
        self.up, self.gate = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        h, rows, heads = self.enter(self.norms[0](x)), len(x), self.heads
        q = _rotated(self.q(h).reshape(rows, heads.q, heads.dim), positions)
        k = _rotated(self.k(h).reshape(rows, heads.kv, heads.dim), positions)
        v = self.v(h).reshape(rows, heads.kv, heads.dim)
        x = x + self.leave(self.o(attend(q, k, v).reshape(rows, heads.q * heads.dim)))
        h = self.enter(self.norms[1](x))
        return x + self.leave(self.down(F.silu(self.gate(h)) * self.up(h)))


def _rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    dim = x.shape[-1]
    angles = positions[:, None].to(x.dtype) * 10000.0 ** (-torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Model(nn.Module):
    def __init__(self, num_layers: int, heads: distca.Heads = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(heads) for _ in range(num_layers)])
        self.norm, self.head = Norm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def loss(self, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum over tokens."""
        return F.cross_entropy(self.head(self.norm(h)), labels, reduction="sum")


def tokens(microbatch: int, rank: int, lengths: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels and positions of the packed documents of a rank."""
    lengths = list(lengths)
    generator = torch.Generator().manual_seed(1009 * microbatch + rank)
    ids, labels = (torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator) for _ in range(2))
    return ids, labels, torch.cat([torch.arange(n) for n in [*lengths, 0]])


def alone(
    num_layers: int, microbatches: list[list[list[int]]], heads: distca.Heads = HEADS
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one process that computes everything in float64.

    Documents are whole on their ranks.
    """
    model, total = Model(num_layers, heads).double(), 0.0
    for number, ranks in enumerate(microbatches):
        for rank, lengths in enumerate(ranks):
            ids, labels, positions = tokens(number, rank, lengths)

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int] = lengths) -> torch.Tensor:
                return torch.cat(
                    [q[:0], *(_causal(*of) for of in zip(*(t.split(lengths) for t in (q, k, v)), strict=True))]
                )

            h = model.embedding(ids)
            for layer in model.layers:
                h = layer(h, positions, attend)
            loss = model.loss(h, labels)
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_as_alone(
    of_ranks: Sequence[tuple[float, dict[str, torch.Tensor]]],
    num_layers: int,
    microbatches: list[list[list[int]]],
    what: object,
) -> None:
    """Asserts that the ranks' losses and gradients add up to those of one process. `what` is told where they do not."""
    loss, gradients = alone(num_layers, microbatches)
    found: dict[str, torch.Tensor] = {}
    for _, of_rank in of_ranks:
        for name, gradient in of_rank.items():
            found[name] = found.get(name, 0) + gradient
    assert set(found) == set(gradients), what
    assert sum(of_rank[0] for of_rank in of_ranks) == pytest.approx(loss, rel=1e-6), what
    for name, gradient in gradients.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 5e-6, (what, name, float(error))


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one document, by PyTorch."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
