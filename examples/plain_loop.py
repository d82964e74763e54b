"""A training loop of one's own, balanced over two ranks, and the same loop in one process.

    python examples/plain_loop.py

Two CPU ranks train one attention layer on packed documents of very different lengths. Every step has other documents,
and the ranks do not have equally many tokens. Then one process trains the same weights on all documents, by PyTorch's
own attention, one document at a time. The program prints the plan of the last step, the losses of both runs, and the
largest difference between their weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import distca

HEADS, WIDTH = distca.Heads(q=8, kv=2, dim=32), 256
# Tokens of the documents of three steps, on rank 0 and on rank 1.
STEPS = [[[90, 260], [1500, 64]], [[800, 800], [1, 1200]], [[1900], [700, 70, 1, 500]]]


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, (HEADS.q + 2 * HEADS.kv) * HEADS.dim)
        self.out = torch.nn.Linear(HEADS.q * HEADS.dim, WIDTH)

    def forward(self, x, plan):  # x: [rows, WIDTH]; a row is a token of this rank's documents
        rows = self.qkv(x).unflatten(-1, (-1, HEADS.dim))  # [rows, heads, dim]
        q, k, v = rows.split((HEADS.q, HEADS.kv, HEADS.kv), dim=1)
        out, lse = distca.core_attention(q, k, v, plan)  # all ranks call it; [rows, HEADS.q, dim]
        return self.out(out.flatten(1))


def train_on_a_rank():  # distca.launch(train_on_a_rank, ranks=2) runs it in two processes
    model, losses = DistributedDataParallel(with_weights(Attention())), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with distca.init(max_tokens=1900, heads=HEADS) as context:  # this process becomes a rank
        for step, lengths in enumerate(STEPS):  # each rank knows the lengths on all ranks
            layout = distca.Layout.from_documents(lengths)
            plan = distca.plan(layout, HEADS, context=context, tolerance=0.01)  # alike on all ranks
            x, y = batch(step, context.rank)
            # Ranks have different numbers of rows, and DDP takes the mean over ranks. Therefore:
            loss = F.mse_loss(model(x, plan), y, reduction="sum") / size_of_all_targets(step)
            optimizer.zero_grad()
            (loss * context.num_ranks).backward()  # all ranks compute here too
            optimizer.step()
            losses.append(loss.item())
    return losses, weights_of(model), plan


class AttentionAlone(Attention):
    """The same layer in one process without distca."""

    def forward(self, x, lengths):
        rows = self.qkv(x).unflatten(-1, (-1, HEADS.dim)).transpose(0, 1)  # [heads, rows, dim]
        documents = []
        for document in rows.split(lengths, dim=1):
            q, k, v = document.split((HEADS.q, HEADS.kv, HEADS.kv))
            documents.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return self.out(torch.cat(documents, dim=1).transpose(0, 1).flatten(1))


def train_alone():
    model, losses = with_weights(AttentionAlone()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, lengths in enumerate(STEPS):
        batches = [batch(step, rank) for rank in range(len(lengths))]
        x, y = (torch.cat(of_ranks) for of_ranks in zip(*batches, strict=True))
        loss = F.mse_loss(model(x, sum(lengths, [])), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(model)


def with_weights(model):
    """The model, whose weights are then the same in every process."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=WIDTH**-0.5, generator=generator)
    return model


def weights_of(model):
    return [weight.detach().clone() for weight in model.parameters()]


def batch(step, rank):
    """Inputs and targets of the rank's rows, [rows, WIDTH] each."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(2, sum(STEPS[step][rank]), WIDTH, generator=generator)


def size_of_all_targets(step):
    """How many numbers the targets of all ranks have together."""
    return sum(map(sum, STEPS[step])) * WIDTH


def main():
    ranks = distca.launch(train_on_a_rank, ranks=2)
    of_ranks, weights, plan = [losses for losses, _, _ in ranks], ranks[0][1], ranks[0][2]
    expected_losses, expected_weights = train_alone()
    print(plan)
    for step, expected in enumerate(expected_losses):
        loss = sum(losses[step] for losses in of_ranks)  # of each rank, its part of the mean over all rows
        print(f"step {step}: loss {loss:.7f} on two ranks, {expected:.7f} in one process")
    difference = max(float((a - b).abs().max()) for a, b in zip(weights, expected_weights, strict=True))
    print(f"largest difference of a weight after {len(STEPS)} steps: {difference:.1e}")


if __name__ == "__main__":
    main()
