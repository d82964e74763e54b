"""The strategies that are compared, by name."""

from __future__ import annotations

from distca.simulator.case import Strategy
from distca.simulator.strategies import (
    all_gather,
    distca_paper,
    head_tail,
    hybrid_context,
    karmarkar_karp,
    ping_pong,
    retained,
    ring,
    rows,
    single_stream,
    spread,
    ulysses,
    ulysses_ring,
    unbalanced,
    variable_chunks,
    wlb,
)

#: All strategies, in the order of tables. The first is what the others are compared with.
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        unbalanced.Unbalanced(),
        variable_chunks.VariableChunks(),
        karmarkar_karp.KarmarkarKarp(),
        all_gather.AllGather(),
        ring.Ring(),
        ulysses.Ulysses(),
        ulysses_ring.UlyssesRing(),
        wlb.Wlb(delay=False),
        wlb.Wlb(delay=True),
        hybrid_context.HybridContext(),
        distca_paper.DistcaPaper(flash_attention_2=True),
        distca_paper.DistcaPaper(flash_attention_2=False),
        rows.Rows(),
        retained.Retained(),
        single_stream.SingleStream(),
        spread.Spread(),
        head_tail.HeadTail(tuned=False),
        head_tail.HeadTail(tuned=True),
        ping_pong.PingPong(),
    )
}
