"""Plans a batch of your own, without any ranks: how uneven it is, what balancing it moves, and the memory that takes.

    python examples/plan_my_lengths.py                  # a short list of lengths
    python examples/plan_my_lengths.py lengths.json
    python examples/plan_my_lengths.py lengths.json --q-heads 32 --kv-heads 8 --dim 128

The file is JSON: for each rank the list of its documents' lengths in tokens, such as [[4000], [700, 1300, 2000]].
A load is a number of pairs, each of a row and a key that the row sees, summed over the query heads. The command
`distca plan` has more options, and draws plans.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import distca

LENGTHS = [[12000, 800, 300], [9000, 4100], [700, 2500, 6200, 3700], [1900] * 6 + [1700]]


def show(lengths: list[list[int]], heads: distca.Heads, tolerance: float) -> None:
    layout = distca.Layout.from_documents(lengths)
    plan = distca.plan(layout, heads, tolerance=tolerance)  # a pure function: no process group, no GPU
    stats = plan.stats
    print(f"{'rank':>4}  {'documents':>9}  {'tokens':>9}  {'load before':>19}  {'load after':>19}")
    for rank, (documents, before, after) in enumerate(zip(lengths, stats.load_before, stats.load, strict=True)):
        print(f"{rank:>4}  {len(documents):>9,}  {layout.num_rows(rank):>9,}  {before:>19,}  {after:>19,}")
    print(f"largest load over the mean: {stats.imbalance_before:.3f} before, {stats.imbalance_after:.3f} after")
    for message, count in stats.bytes.items():
        print(f"bytes of {message} between all ranks, in each layer: {count:,}")
    print("memory on every rank, in bytes:")
    print(distca.memory_report(plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths", nargs="?", type=Path, help="JSON: for each rank the lengths of its documents")
    parser.add_argument("--q-heads", type=int, default=32, help="query heads (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="key/value heads (default: 8)")
    parser.add_argument("--dim", type=int, default=128, help="dimension of a head (default: 128)")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the largest load (default: 0.05)")
    options = parser.parse_args()
    lengths = LENGTHS if options.lengths is None else json.loads(options.lengths.read_text())
    heads = distca.Heads(q=options.q_heads, kv=options.kv_heads, dim=options.dim, dtype=torch.bfloat16)
    show(lengths, heads, options.tolerance)


if __name__ == "__main__":
    main()
