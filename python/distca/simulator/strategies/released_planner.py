"""The planner of the released DistCA: which rows of which documents move to which server.

Source: Zhuang et al., arXiv 2510.18121, section 4.2, and its release, ``distca/planner/planner.py``. Ranks with less
than the mean load take rows, the neediest first, until they lack no more than the tolerance. Each time the document
with the fewest bytes a visible pair gives rows, from a rank with more than the mean. A move is charged the queries that
travel and the keys and values of the whole document. Rows leave a document from its middle, equally many before and
after it, so that each row is worth the same.

What differs: documents may be odd, and the middle row then goes with the rows before it. Loads are whole numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from distca.heads import Heads


@dataclasses.dataclass(frozen=True)
class Item:
    """Rows of a document that one server computes: those from `begin` to `end`, and the same from the document's end.

    Attributes:
        document: its number.
        length: of the document.
        home, server: where its rows lie, and where they are computed.
        begin, end: rows ``[begin, end)`` with `end` at most half the length, rounded up.
    """

    document: int
    length: int
    home: int
    server: int
    begin: int
    end: int

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Its rows; a whole document is one piece."""
        if self.begin == 0 and self.end == self.length - self.length // 2:
            return [(0, self.length)]
        mirrored = (self.length - min(self.end, self.length // 2), self.length - self.begin)
        return [piece for piece in ((self.begin, self.end), mirrored) if piece[0] < piece[1]]

    @property
    def rows(self) -> int:
        """Number of its rows."""
        return sum(end - begin for begin, end in self.pieces)

    @property
    def pairs(self) -> int:
        """Visible pairs of a query head."""
        return sum((end - begin) * (begin + end + 1) // 2 for begin, end in self.pieces)


def released_plan(documents: Sequence[Sequence[tuple[int, int]]], heads: Heads, tolerance: float) -> list[Item]:
    """Moves rows until every rank has the mean load within the tolerance, as far as that succeeds.

    Args:
        documents: for each rank the number and the length of its documents.
        heads: what bytes of queries and of keys compare by.
        tolerance: fraction of the mean load that a rank may lack.

    Examples:
        >>> import distca
        >>> from distca.simulator.strategies.released_planner import released_plan
        >>> items = released_plan([[(0, 8)], []], distca.Heads(q=4, kv=2, dim=8), tolerance=0.1)
        >>> [(item.server, item.pieces) for item in items]
        [(0, [(0, 2), (6, 8)]), (1, [(2, 4), (4, 6)])]
    """
    items = [Item(number, n, home, home, 0, n - n // 2) for home, of in enumerate(documents) for number, n in of]
    if not items:
        return []
    loads = [0] * len(documents)
    for item in items:
        loads[item.home] += item.pairs
    mean = sum(loads) / len(loads)
    surplus = torch.tensor([load - mean for load in loads], dtype=torch.float64)
    pairs, lengths, servers = (
        torch.tensor(values, dtype=torch.float64)
        for values in zip(*((item.pairs, item.length, item.server) for item in items), strict=True)
    )
    servers = servers.long()
    query, keys = heads.q * heads.dim, heads.kv * (heads.dim + heads.value_dim)
    for taker in sorted(
        (rank for rank in range(len(loads)) if surplus[rank] < 0), key=lambda rank: float(surplus[rank])
    ):
        while -float(surplus[taker]) > tolerance * mean:
            gives = torch.minimum(pairs, surplus[servers]).clamp_max(-float(surplus[taker]))
            per_pair = (query * gives / (lengths + 1) + keys * (lengths + 1)) / gives
            best = int(torch.where(gives > 0, per_pair, torch.inf).argmin())
            if gives[best] <= 0:
                break
            giver = int(servers[best])
            stays, moved = _split(items[best], float(gives[best]), taker)
            if moved is None:
                break
            if stays is None:
                items[best] = moved
                servers[best] = taker
            else:
                items[best] = stays
                items.append(moved)
                pairs[best] = stays.pairs
                pairs, lengths, servers = (
                    torch.cat([of, of.new_tensor([value])])
                    for of, value in ((pairs, moved.pairs), (lengths, moved.length), (servers, taker))
                )
            surplus[giver] -= moved.pairs
            surplus[taker] += moved.pairs
    return items


def _split(item: Item, pairs: float, server: int) -> tuple[Item | None, Item | None]:
    """What stays of an item, and what moves to a server: at most so many pairs, from the middle of the document."""
    if pairs >= item.pairs:
        return None, dataclasses.replace(item, server=server)
    rows = int(pairs / (item.length + 1))
    if rows == 0:
        return item, None
    cut = item.end - rows
    return dataclasses.replace(item, end=cut), dataclasses.replace(item, server=server, begin=cut)
