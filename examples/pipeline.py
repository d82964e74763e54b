"""Pipeline parallelism in a training loop of one's own: idle stages compute attention of the busy ones.

    python examples/pipeline.py

Four CPU ranks train a model of four attention layers: two pipeline stages, each on two ranks. In every tick all stages
do the same phase, and all four ranks share the attention of the tick. The program prints the table of ticks, how even
attention is over the ranks, and for each step the loss, which falls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import distca
from distca.pipeline import PipelinePlans, Ticks, Work

STAGES = [[0, 1], [2, 3]]  # the ranks of each stage
LENGTHS = [  # tokens of the documents: [micro-batch][rank of a stage]
    [[500, 100], [100] * 6],
    [[300, 300], [580, 20]],
    [[60] * 10, [400, 200]],
    [[600], [200, 200, 200]],
]
LAYERS = 2  # of each stage
HEADS = distca.Heads(q=4, kv=2, dim=16)
WIDTH, STEPS = 64, 5


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.kv = torch.nn.Linear(WIDTH, 2 * HEADS.kv * HEADS.dim)

    def forward(self, x: torch.Tensor, plan: distca.pipeline.TickPlan) -> torch.Tensor:  # x: [rows, WIDTH]
        q = self.q(x).view(-1, HEADS.q, HEADS.dim)
        k, v = self.kv(x).view(-1, 2, HEADS.kv, HEADS.dim).unbind(1)
        out, _ = distca.core_attention(q, k, v, plan)  # finds the plan of the tick that is under way
        return x + self.out(out.flatten(1))


def train_on_a_rank() -> tuple[str, list[float]]:
    torch.manual_seed(dist.get_rank() // 2)  # the ranks of a stage have the same weights
    layers = torch.nn.ModuleList([Attention() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    data = dist.new_subgroups_by_enumeration(STAGES)[0]
    layouts = [distca.Layout.from_documents(of_ranks) for of_ranks in LENGTHS]
    losses = []
    with distca.init(max_tokens=600, heads=HEADS) as context:
        plans = PipelinePlans(layouts, HEADS, stages=STAGES, layers=LAYERS, context=context, tolerance=0.02)
        for _ in range(STEPS):
            ticks = Ticks(plans, context=context)

            def stage(work: Work, x: torch.Tensor | None, ticks: Ticks = ticks) -> torch.Tensor:
                if x is None:  # the first stage reads its tokens
                    generator = torch.Generator().manual_seed(10 * work.microbatch + plans.index)
                    x = torch.randn(plans.rows(work.microbatch), WIDTH, generator=generator)
                for layer in layers:
                    x = layer(x, ticks.plan)
                return x.square().mean() / len(LENGTHS) if plans.stage == 1 else x  # the last stage returns a loss

            of_microbatches = ticks.run(stage, like=torch.empty(0, WIDTH))
            for weight in layers.parameters():  # data parallel inside a stage
                dist.all_reduce(weight.grad, group=data)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(sum(of_microbatches)))
    stats = plans.stats
    even = f"largest load over the mean, all ticks: {stats.imbalance_before:.2f} -> {stats.imbalance_after:.2f}"
    return f"{plans.table}\n{even}", losses


if __name__ == "__main__":
    results = distca.launch(train_on_a_rank, ranks=4, threads=1)
    print(results[0][0])
    for step, losses in enumerate(zip(*(losses for _, losses in results), strict=True)):
        print(f"step {step}: loss {sum(losses) / 2:.4f}")
