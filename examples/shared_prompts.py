"""Several answers to each prompt, as in GRPO: each prompt is computed once, and all its answers see it.

    python examples/shared_prompts.py

Two CPU ranks train a block of attention and MLP on two prompts, the longer of which has eight answers. They do so
twice, from the same weights: every answer with a prompt of its own, and with answers that branch off their prompts. The
program prints the rows and the time of both ways, their losses, and the largest difference between their weights.

An answer begins with the prompt's last token. That token's row differs from answer to answer in what comes after it,
so the prompt itself is one token shorter, and every row of an answer predicts the next token of that answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import distca

HEADS, WIDTH, VOCABULARY, STEPS = distca.Heads(q=4, kv=2, dim=32), 128, 512, 3
PROMPTS = [1200, 300]  # tokens of the prompt on each rank, and of its answers
ANSWERS = [[150, 90, 200, 60, 120, 180, 30, 170], [100, 220]]
Segments = list[tuple[int, int, int]]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(2048, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, (HEADS.q + 2 * HEADS.kv) * HEADS.dim)
        self.out = torch.nn.Linear(HEADS.q * HEADS.dim, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        self.logits = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, plan: distca.Plan) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)  # [rows, WIDTH]
        rows = self.qkv(x).unflatten(-1, (-1, HEADS.dim))
        out, _ = distca.core_attention(*rows.split((HEADS.q, HEADS.kv, HEADS.kv), dim=1), plan)
        x = x + self.out(out.flatten(1))
        return self.logits(x + self.mlp(x))


def repeated() -> tuple[distca.Layout, list[list[torch.Tensor]]]:
    """Each answer is a document with the rows of its prompt before it. Returns the tokens of each segment, too."""
    documents = [[torch.cat([prompt[:-1], answer]) for answer in answers] for prompt, answers in texts()]
    return distca.Layout.from_documents([[len(one) for one in of_rank] for of_rank in documents]), documents


def shared() -> tuple[distca.Layout, list[list[torch.Tensor]]]:
    """Each prompt is a document, and its answers are branches of it: they share all its rows."""
    segments: list[Segments] = []
    branches, tokens, number = {}, [], 0
    for prompt, answers in texts():
        first, of_prompt = len(prompt) - 1, number
        segments.append([(of_prompt, 0, first)])
        tokens.append([prompt[:-1], *answers])
        for answer in answers:
            number += 1
            branches[number] = of_prompt
            segments[-1].append((number, first, first + len(answer)))
        number += 1
    return distca.Layout(segments, branches=branches), tokens


def texts() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """For each rank the tokens of its prompt, and of the answers, which begin with the prompt's last token."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length, answers in zip(PROMPTS, ANSWERS, strict=True):
        prompt = torch.randint(VOCABULARY, (length,), generator=generator)
        rest = [torch.randint(VOCABULARY, (n,), generator=generator) for n in answers]
        made.append((prompt, [torch.cat([prompt[-1:], answer]) for answer in rest]))
    return made


def train_on_a_rank(way: Callable[[], tuple[distca.Layout, list[list[torch.Tensor]]]]):
    torch.manual_seed(0)
    model = DistributedDataParallel(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    layout, tokens = way()
    with distca.init(max_tokens=16_384, heads=HEADS) as context:
        plan = distca.plan(layout, HEADS, context=context)  # alike on all ranks
        ids, positions = torch.cat(tokens[context.rank]), layout.position_ids(context.rank)
        # The rows that predict a token of an answer: all of it but the last.
        of_answer = [torch.cat([one[1:], one.new_full((1,), -100)]) for one in tokens[context.rank]]
        prompt = PROMPTS[context.rank] - 1
        targets = torch.cat([one.masked_fill(positions_of < prompt, -100) for one, positions_of in zip(
            of_answer, positions.split([len(one) for one in of_answer]), strict=True)])  # fmt: skip
        for step in range(STEPS + 1):
            if step == 1:  # the first one is not timed
                start = time.perf_counter()
            loss = F.cross_entropy(model(ids, positions, plan), targets, reduction="sum") / sum(map(sum, ANSWERS))
            optimizer.zero_grad()
            (loss * context.num_ranks).backward()  # DDP takes the mean over ranks
            optimizer.step()
            losses.append(loss.item())
    seconds = (time.perf_counter() - start) / STEPS
    return losses, [weight.detach() for weight in model.parameters()], layout, seconds


def main() -> None:
    results = {}
    for way in (repeated, shared):
        ranks = distca.launch(train_on_a_rank, way, ranks=2)
        losses = [sum(of_step) for of_step in zip(*(of_rank[0] for of_rank in ranks), strict=True)]
        _, weights, layout, seconds = ranks[0]
        results[way] = weights
        rows = sum(layout.num_rows(rank) for rank in range(2))
        print(f"{way.__name__}: {rows:,} rows, {1000 * seconds:.0f} ms a step, losses", *(f"{x:.6f}" for x in losses))
    difference = max(float((a - b).abs().max()) for a, b in zip(results[repeated], results[shared], strict=True))
    print(f"largest difference of a weight: {difference:.1e}")


if __name__ == "__main__":
    main()
