"""A data loader that chooses where the tokens of long documents lie: `distca.Layout.spread`, and packing beside it.

    python examples/choose_homes.py

Four CPU ranks train one attention layer to predict the next token. Every step has one long document and many short
ones. The loader knows the lengths of the whole step, so that it may put any token on any rank. The program trains twice
with the same weights. First documents are packed one after another, so that the keys of the long one leave one or two
ranks for all others. Then they lie as `Layout.spread` says. The program prints the losses of both runs, and how many
bytes the ranks send.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

import distca

RANKS, STEPS, WORDS, WIDTH = 4, 5, 64, 64
HEADS = distca.Heads(q=4, kv=1, dim=16)
LENGTHS = [3000, *[500] * 10, *[100] * 20]  # of the documents of a step; 2,500 tokens a rank


def documents_of(step):  # a real loader reads only the tokens of its own rank
    generator = torch.Generator().manual_seed(step)
    lengths = random.Random(step).sample(LENGTHS, len(LENGTHS))
    return [torch.randint(1, 4, (n,), generator=generator).cumsum(0) % WORDS for n in lengths]


def homes(way, lengths):
    if way == "packed":
        return distca.Layout.packed(lengths, ranks=RANKS, tokens_per_rank=sum(lengths) // RANKS)
    return distca.Layout.spread(lengths, ranks=RANKS)


def loader(way, rank):
    for step in range(STEPS):
        documents = documents_of(step)
        layout = homes(way, [len(document) for document in documents])
        # The next tokens are shifted before documents are cut; the last token of a document has none.
        shifted = [F.pad(document[1:], (0, 1), value=-100) for document in documents]
        yield {
            "layout": layout,
            "ids": torch.cat([documents[d][begin:end] for d, begin, end in layout.segments(rank)]),
            "targets": torch.cat([shifted[d][begin:end] for d, begin, end in layout.segments(rank)]),
            "positions": layout.position_ids(rank),  # for rotary embeddings; this layer has none
            "num_targets": sum(len(document) - 1 for document in documents),  # on all ranks
        }


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, (HEADS.q + 2 * HEADS.kv) * HEADS.dim)
        self.head = torch.nn.Linear(HEADS.q * HEADS.dim + WIDTH, WORDS)

    def forward(self, ids, plan):
        x = self.embedding(ids)
        rows = self.qkv(x).unflatten(-1, (-1, HEADS.dim))
        q, k, v = rows.split((HEADS.q, HEADS.kv, HEADS.kv), dim=1)
        out, lse = distca.core_attention(q, k, v, plan)
        return self.head(torch.cat((out.flatten(1), x), dim=1))


def train_on_a_rank(way):
    torch.manual_seed(0)
    model, losses = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    with distca.init(max_tokens=2500, heads=HEADS) as context:
        batches = loader(way, context.rank)
        with distca.PlanAhead(batches, heads=HEADS, context=context, layout=lambda batch: batch["layout"]) as steps:
            for batch, plan in steps:
                logits = model(batch["ids"], plan)
                loss = F.cross_entropy(logits, batch["targets"], reduction="sum") / batch["num_targets"]
                optimizer.zero_grad()
                loss.backward()
                for tensor in [loss.detach(), *(weight.grad for weight in model.parameters())]:
                    torch.distributed.all_reduce(tensor)  # each rank has the part of its own targets
                optimizer.step()
                losses.append(loss.item())
    sent = [sum(t.bytes for t in plan.transfers if t.source == rank) for rank in range(RANKS)]
    return losses, max(sent), sum(sent) // RANKS


def train_in_both_ways():
    return {way: train_on_a_rank(way) for way in ("packed", "spread")}


def main():
    found = distca.launch(train_in_both_ways, ranks=RANKS)[0]  # all ranks return the same
    for way, (losses, most, mean) in found.items():
        print(f"{way}: losses {' '.join(f'{loss:.6f}' for loss in losses)}")
        print(f"{way}: in a layer of the last step ranks send {mean:,} bytes, the busiest {most:,}")
    differences = [abs(a - b) for a, b in zip(found["packed"][0], found["spread"][0], strict=True)]
    print(f"largest difference of a loss: {max(differences):.1e}")


if __name__ == "__main__":
    main()
