"""Ping-pong in a training loop of one's own: one half of a batch computes while the other half's rows travel.

    python examples/ping_pong.py

Two CPU ranks train a model of two attention layers. Every step takes the batch in two halves, twice from the same
weights: one half after the other, and by distca.PingPong. The program prints for each step whether all outputs and
gradients have the same bits. In the end it prints how long the ranks waited in each way, over an emulated network
link. Needs greenlet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import distca

LENGTHS = [[1000, 800], [300, 200, 200, 100, 100, 90]]  # tokens of the documents on each rank
HEADS = distca.Heads(q=4, kv=4, dim=64)
WIDTH, STEPS = 256, 3
LINK = distca.Link(bytes_per_second=250e6, latency=1e-4)  # without it, ranks of one host copy rows themselves
AFTER, PING_PONG = "one after the other", "ping-pong"


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, plan: distca.Plan) -> torch.Tensor:  # x: [rows, WIDTH]
        q, k, v = self.qkv(x).view(-1, 3, HEADS.q, HEADS.dim).unbind(1)
        out, _ = distca.core_attention(q, k, v, plan)
        return x + self.out(out.flatten(1))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention(), Attention()])

    def forward(self, x: torch.Tensor, plan: distca.Plan) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, plan)
        return x


def train_on_a_rank() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()  # the same weights on all ranks
    both = distca.PingPong(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ways: dict[str, Callable[..., Any]] = {AFTER: lambda first, second: (model(**first), model(**second))}
    ways[PING_PONG] = both  # the model stays as it is
    waited = dict.fromkeys(ways, 0.0)
    steps = []
    with distca.init(max_tokens=1800, heads=HEADS, link=LINK) as context:
        first, second = batch_in_halves(context)
        for _ in range(STEPS):
            results = {}
            for way, run in ways.items():
                optimizer.zero_grad()
                context.start_trace()
                outputs = run(first, second)
                loss = outputs[0].square().mean() + outputs[1].square().mean()
                loss.backward()
                waited[way] += context.take_trace().exposed
                results[way] = [*outputs, *(weight.grad for weight in model.parameters())]
            same = all(map(torch.equal, *results.values()))
            steps.append((loss.item(), same))
            for weight in model.parameters():
                dist.all_reduce(weight.grad)  # what DDP does; it would go around PingPong
            optimizer.step()
    return {"steps": steps, "waited": waited}


def batch_in_halves(context: distca.Context) -> list[dict[str, Any]]:
    """The model's keyword arguments for each half."""
    layout = distca.Layout.from_documents(LENGTHS)
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randn(layout.num_rows(context.rank), WIDTH, generator=generator)
    return [
        {
            "x": half.take(x, context.rank),  # the rows of its documents
            "plan": distca.plan(half.layout, HEADS, context=context, tolerance=0.02, overlap=True),
        }
        for half in distca.halves(layout)  # as much attention, and on every rank as many tokens, in each
    ]


def main() -> None:
    ranks = distca.launch(train_on_a_rank, ranks=len(LENGTHS))
    for step, of_ranks in enumerate(zip(*(rank["steps"] for rank in ranks), strict=True)):
        loss = sum(loss for loss, _ in of_ranks) / len(ranks)
        same = "the same bits" if all(same for _, same in of_ranks) else "OTHER BITS"
        print(f"step {step}: loss {loss:.4f}, outputs and gradients of both ways have {same}")
    for way in (AFTER, PING_PONG):
        print(f"{way}: ranks waited {sum(rank['waited'][way] for rank in ranks) / STEPS * 1e3:.0f} ms a step")


if __name__ == "__main__":
    main()
