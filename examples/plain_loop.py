"""A training loop of one's own, balanced over two ranks, and the same loop in one process.

    python examples/plain_loop.py

Two CPU ranks train one attention layer on packed documents of very different lengths: without distca, rank 0 would
compute 3.6 times the attention of rank 1. Then one process trains the same weights on all documents, by PyTorch's own
attention, one document at a time. The program prints the plan, the losses of both runs, and the largest difference
between their weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import distca

LENGTHS = [[1900], [700, 70, 1, 500, 129, 500]]  # tokens of the documents on each rank
HEADS = distca.Heads(q=8, kv=2, dim=32, dtype=torch.float32)
WIDTH, STEPS = 256, 3


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, (HEADS.q + 2 * HEADS.kv) * HEADS.dim)
        self.out = torch.nn.Linear(HEADS.q * HEADS.dim, WIDTH)

    def forward(self, x, plan):  # x: [rows, WIDTH], the documents of this rank one after another
        rows = self.qkv(x).unflatten(-1, (-1, HEADS.dim))  # [rows, heads, dim]
        q, k, v = rows.split((HEADS.q, HEADS.kv, HEADS.kv), dim=1)
        out, lse = distca.core_attention(q, k, v, plan)  # called by all ranks; [rows, HEADS.q, dim]
        return self.out(out.flatten(1))


def train_on_a_rank():
    with distca.init(max_tokens=1900, heads=HEADS) as context:  # every process becomes a rank
        layout = distca.Layout.from_documents(LENGTHS)  # each rank knows the lengths on all ranks
        plan = distca.plan(layout, HEADS, context=context, tolerance=0.01)  # the same on all ranks
        model, losses = DistributedDataParallel(with_weights(Attention())), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x, y = batch(context.rank)
        for _ in range(STEPS):
            loss = F.mse_loss(model(x, plan), y)
            optimizer.zero_grad()
            loss.backward()  # all ranks compute here too
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
    batches = [batch(rank) for rank in range(len(LENGTHS))]
    x, y = (torch.cat(of_ranks) for of_ranks in zip(*batches, strict=True))
    for _ in range(STEPS):
        loss = F.mse_loss(model(x, sum(LENGTHS, [])), y)
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


def batch(rank):
    """Inputs and targets of the rank's rows, [rows, WIDTH] each."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, sum(LENGTHS[rank]), WIDTH, generator=generator)


def main():
    ranks = distca.launch(train_on_a_rank, ranks=len(LENGTHS))
    of_ranks, weights, plan = [losses for losses, _, _ in ranks], ranks[0][1], ranks[0][2]
    expected_losses, expected_weights = train_alone()
    print(plan)
    for step, expected in enumerate(expected_losses):
        # The mean of the ranks' losses is that of all rows, because all ranks have as many rows.
        loss = sum(losses[step] for losses in of_ranks) / len(of_ranks)
        print(f"step {step}: loss {loss:.7f} on two ranks, {expected:.7f} in one process")
    difference = max(float((a - b).abs().max()) for a, b in zip(weights, expected_weights, strict=True))
    print(f"largest difference of a weight after {STEPS} steps: {difference:.1e}")


if __name__ == "__main__":
    main()
