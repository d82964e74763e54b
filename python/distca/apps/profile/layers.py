"""Times of what a layer has besides attention: matrix products, and what memory binds.

Every piece runs as it does in training: several times forward on different rows, with all results kept, and then
backward. What a piece finds in the caches, and which memory it writes, is therefore like in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distca.simulator.setup import Model

#: Pieces that are run forward before the first goes backward, like the layers of a model.
DEPTH = 4
#: Rows of the products that are measured, and of the other parts. Logits of more rows would be new memory every time.
ROWS = (128, 512, 2048, 4096)
PART_ROWS = (128, 512, 2048, 6144)
#: Numbers of an optimizer step.
WEIGHTS = (1 << 16, 1 << 19, 1 << 22, 1 << 24)

Tensors = tuple[torch.Tensor, ...]


class Piece(NamedTuple):
    """A piece of a layer: what has gradients, and its forward, whose results go backward."""

    leaves: Tensors
    forward: Callable[[], Tensors]


def gemms(models: Iterable[Model], rounds: int) -> list[dict[str, float]]:
    """The rates of all products of these models' layers and heads."""
    shapes = sorted({shape for model in models for shape in shapes_of(model)})
    table = []
    for n, k in shapes:
        weights = [torch.randn(n, k).requires_grad_() for _ in range(DEPTH)]
        for m in ROWS:
            inputs = [torch.randn(1, m, k).requires_grad_() for _ in range(DEPTH)]
            pieces = [Piece(both, partial(_product, *both)) for both in zip(inputs, weights, strict=True)]
            forward, backward = timed(pieces, rounds)
            flop = 2.0 * m * n * k
            rates = {"tflops": flop / forward / 1e12, "backward_tflops": 2 * flop / backward / 1e12}
            table.append({"m": m, "n": n, "k": k, **rates})
    return table


def shapes_of(model: Model) -> list[tuple[int, int]]:
    """The shapes (n, k) of a model's products, ``[m, k] @ [k, n]``."""
    hidden, queries, keys = model.hidden, model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    inner, words = model.intermediate, model.vocabulary
    return [(queries, hidden), (keys, hidden), (hidden, queries), (inner, hidden), (hidden, inner), (words, hidden)]


def parts(models: Iterable[Model], rounds: int) -> list[dict[str, Any]]:
    """The times of the parts that memory binds, by the numbers of their arrays; of several models the mean."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for model in models:
        for rows in PART_ROWS:
            for name, numbers, make in _pieces(model, rows):
                times = timed([make() for _ in range(DEPTH)], rounds)
                found.setdefault((name, numbers), []).append(times)
    table = []
    for (name, numbers), of_models in sorted(found.items()):
        forward, backward = (statistics.mean(of_phase) for of_phase in zip(*of_models, strict=True))
        table.append({"part": name, "numbers": numbers, "forward": forward, "backward": backward})
    return table + [
        {"part": "optimizer", "numbers": numbers, "forward": optimizer_seconds(numbers, rounds)} for numbers in WEIGHTS
    ]


def _pieces(model: Model, rows: int) -> Iterator[tuple[str, int, Callable[[], Piece]]]:
    """Name, numbers and a maker of each part of a layer of Llama as transformers computes it."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    hidden, inner, words = model.hidden, model.intermediate, model.vocabulary
    q_heads, kv_heads, dim = model.q_heads, model.kv_heads, model.head_dim

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(1, rows, *shape).requires_grad_()

    def norm() -> Piece:
        module, x = LlamaRMSNorm(hidden), leaf(hidden)
        return Piece((x, module.weight), lambda: (module(x),))

    def residual() -> Piece:
        x, y = leaf(hidden), leaf(hidden)
        return Piece((x, y), lambda: (x + y,))

    def total() -> Piece:
        x, y = torch.randn(2, rows, hidden)
        return Piece((), lambda: (x.add_(y),))

    def activation() -> Piece:
        gate, up = leaf(inner), leaf(inner)
        return Piece((gate, up), lambda: (F.silu(gate) * up,))

    def loss() -> Piece:
        logits, labels = leaf(words), torch.randint(words, (rows,))
        return Piece((logits,), lambda: (F.cross_entropy(logits.squeeze(0).float(), labels, reduction="sum"),))

    def embedding() -> Piece:
        table = torch.randn(words, hidden).requires_grad_()
        ids = torch.randint(words, (1, rows))
        return Piece((table,), lambda: (F.embedding(ids, table),))

    def rotary() -> Piece:
        q, k = leaf(q_heads * dim), leaf(kv_heads * dim)
        cos, sin = torch.randn(2, 1, rows, dim)
        return Piece((q, k), partial(_rotated, q, k, cos, sin, dim))

    yield "norm", rows * hidden, norm
    yield "residual", rows * hidden, residual
    yield "sum", rows * hidden, total
    yield "activation", rows * inner, activation
    yield "loss", rows * words, loss
    yield "embedding", rows * hidden, embedding
    yield "rotary", rows * (q_heads + kv_heads) * dim, rotary


def _product(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    return (F.linear(x, weight),)


def _rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> Tensors:
    """Queries and keys as projections give them, turned, and in the form in which core attention takes them."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    heads = [x.unflatten(-1, (-1, dim)).transpose(1, 2) for x in (q, k)]
    return tuple(x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*heads, cos, sin))


def timed(pieces: list[Piece], rounds: int) -> tuple[float, float]:
    """Median seconds of forward and of backward of one piece. All go forward, and then backward in reverse order."""
    gradients = gradients_of(pieces)
    times = [timed_once(pieces, gradients) for _ in range(rounds + 1)]
    forward, backward = (statistics.median(of_phase) / len(pieces) for of_phase in zip(*times[1:], strict=True))
    return forward, backward


def gradients_of(pieces: list[Piece]) -> list[Tensors]:
    """For each piece gradients of its results."""
    return [tuple(torch.ones(out.shape) for out in piece.forward()) for piece in pieces]


def timed_once(pieces: list[Piece], gradients: list[Tensors]) -> tuple[float, float]:
    """Seconds of forward of all pieces, and of backward in reverse order."""
    begin = time.perf_counter()
    made = [piece.forward() for piece in pieces]
    middle = time.perf_counter()
    for piece, of_piece in zip(reversed(pieces), reversed(gradients), strict=True):
        outs = made.pop()
        if piece.leaves:
            torch.autograd.grad(outs, piece.leaves, of_piece)
    return middle - begin, time.perf_counter() - middle


def optimizer_seconds(numbers: int, rounds: int) -> float:
    """Median seconds of a step of AdamW on so many weights, in matrices as a model has them."""
    weights = [torch.randn(numbers // 8, requires_grad=True) for _ in range(8)]
    for one in weights:
        one.grad = torch.randn(one.shape)
    optimizer = torch.optim.AdamW(weights)
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def layer_overhead(model: Model, rounds: int) -> float:
    """Seconds that a layer of transformers takes on the host besides its pieces, in forward and backward each.

    It is what a layer of one row takes more than its pieces of one row.
    """
    times = list(timed(decoder_layers(model, lambda forward: forward()), rounds))
    counts = {"norm": 2, "residual": 2, "activation": 1, "rotary": 1}
    pieces = [(make, counts[name]) for name, _, make in _pieces(model, 1) if name in counts]
    pieces += [(partial(_product_of, n, k), 1) for n, k in shapes_of(model)[:-1]]
    pieces += [(partial(_product_of, *shapes_of(model)[i]), 1) for i in (1, 3)]  # values, and the second of two
    for make, count in pieces:
        for phase, seconds in enumerate(timed([make() for _ in range(DEPTH)], rounds)):
            times[phase] -= count * seconds
    return max(0.0, statistics.mean(times))


def recompute_overhead(model: Model, rounds: int) -> float:
    """Seconds that a layer takes on the host besides if it is run again, as `distca train` has it.

    It is what a layer of one row takes more than with another forward.
    """
    from torch.utils.checkpoint import checkpoint

    from distca.checkpoint import save_core_attention

    def checkpointed(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        return checkpoint(forward, use_reentrant=False, context_fn=save_core_attention)

    forward, backward = timed(decoder_layers(model, lambda forward: forward()), rounds)
    return max(0.0, sum(timed(decoder_layers(model, checkpointed), rounds)) - 2 * forward - backward)


def decoder_layers(
    model: Model, run: Callable[[Callable[[], torch.Tensor]], torch.Tensor], rows: int = 1, attention: str = "sdpa"
) -> list[Piece]:
    """Layers of transformers' Llama on so many rows each. `run` calls the forward of one."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = llama_config(model, attention)
    places = tuple(torch.randn(2, 1, rows, model.head_dim))
    pieces = []
    for _ in range(DEPTH):
        layer, x = LlamaDecoderLayer(config, 0), torch.randn(1, rows, model.hidden).requires_grad_()
        forward = partial(layer, x, position_embeddings=places)
        pieces.append(Piece((x, *layer.parameters()), partial(_alone, run, forward)))
    return pieces


def llama_config(model: Model, attention: str) -> Any:
    """The model as a configuration of transformers, with the implementation of attention of this name."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_attention_heads=model.q_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
    )
    config._attn_implementation = attention
    return config


def _alone(run: Callable[[Callable[[], torch.Tensor]], torch.Tensor], forward: Callable[[], torch.Tensor]) -> Tensors:
    return (run(forward),)


def _product_of(n: int, k: int) -> Piece:
    x, weight = torch.randn(1, 1, k).requires_grad_(), torch.randn(n, k).requires_grad_()
    return Piece((x, weight), partial(_product, x, weight))
