"""The command `distca plan`: plans a batch without running it, and prints, writes or draws the plan's effects."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from distca.apps.common.files import write_given
from distca.apps.common.options import add_debug
from distca.apps.common.workloads import draw_documents, read_lengths, read_workload
from distca.apps.plan import compare
from distca.apps.plan.heap import heap_summary
from distca.errors import InvalidArgumentError
from distca.heads import DTYPES, Heads
from distca.planner.cost import CostModel
from distca.planner.layout import Layout
from distca.planner.plan import Plan
from distca.planner.planning import plan
from distca.planner.stats import PlanStats


def add_command(commands: Any) -> None:
    """Adds `plan` to the parser of the command line."""
    command = commands.add_parser(
        "plan",
        help="plan a batch without running it; show loads, bytes and tasks",
        description="Plans the core attention of a batch. Needs no GPU and runs nothing. Prints what the plan does; "
        "can also write it as JSON or draw it. The batch comes from a workload file, or is drawn at random from a "
        "list of document lengths.",
    )
    batch = command.add_argument_group("the batch")
    batch.add_argument("--workload", type=Path, help='JSON with "documents": the lengths of each rank\'s documents')
    batch.add_argument("--lengths", type=Path, help="JSON list of document lengths to draw from")
    batch.add_argument("--ranks", type=int, help="with --lengths: number of ranks")
    batch.add_argument("--tokens-per-rank", type=int, help="with --lengths: tokens of each rank")
    batch.add_argument("--seed", type=int, default=0, help="with --lengths: seed of the draws (default: 0)")
    batch.add_argument(
        "--layout",
        choices=("documents", "packed", "head-tail", "spread"),
        default="documents",
        help="documents: each document whole on its rank; packed: documents one after another, cut where a rank is "
        "full; head-tail: documents cut from both ends over the ranks, as in context parallelism; spread: long "
        "documents cut so over several ranks, others whole (default: documents)",
    )
    batch.add_argument(
        "--longer-than", type=int, help="with --layout head-tail: cut only documents of more tokens (default: all)"
    )
    batch.add_argument(
        "--context", type=int, help="with --layout head-tail: ranks that share a document (default: all)"
    )
    model = command.add_argument_group("the model's attention")
    model.add_argument("--q-heads", type=int, default=32, help="query heads (default: 32)")
    model.add_argument("--kv-heads", type=int, default=8, help="key/value heads (default: 8)")
    model.add_argument("--head-dim", type=int, default=128, help="dimension of a head (default: 128)")
    model.add_argument("--value-dim", type=int, help="dimension of a value head (default: that of a head)")
    model.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of q, k and v (default: bf16)")
    model.add_argument(
        "--mask",
        choices=("causal", "full"),
        default="causal",
        help="causal: a row sees the rows before it and itself; full: it sees its whole document (default: causal)",
    )
    model.add_argument(
        "--window",
        type=int,
        help="sliding window: a row sees itself, the WINDOW - 1 rows before it and, with --mask full, the WINDOW - 1 "
        "rows after it (default: no window)",
    )
    planner = command.add_argument_group("the planner")
    planner.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        help="how far the largest load may be above the mean, as a fraction (default: 0.05)",
    )
    planner.add_argument("--min-rows", type=int, help="rows of the smallest piece of a document (default: 128)")
    planner.add_argument("--servers", type=_ranks, help="ranks that compute attention, such as 0,1,6 (default: all)")
    planner.add_argument(
        "--ranks-per-node",
        type=int,
        help="number of neighbouring ranks that are one node; bytes between nodes are avoided first (default: all)",
    )
    planner.add_argument(
        "--cost",
        default="pairs",
        help="cost model: pairs counts (query, key) pairs; cpu-avx512 and h200 come with distca; or a file that "
        "`distca profile` wrote (default: pairs)",
    )
    planner.add_argument(
        "--objective",
        choices=("all", "forward"),
        default="all",
        help="which bytes the planner keeps few: those of forward and backward, or of forward alone (default: all)",
    )
    planner.add_argument(
        "--whole-heads",
        action="store_true",
        help="keep all heads of a row on one server (default: heads of a document may go to different servers)",
    )
    planner.add_argument(
        "--retain-bytes",
        type=int,
        default=0,
        help="bytes of keys and values that a rank may keep from forward to backward (default: 0)",
    )
    planner.add_argument(
        "--reduce-dtype",
        choices=DTYPES,
        default="fp32",
        help="dtype in which contributions of several servers to a key's gradients travel: fp32 or that of --dtype "
        "(default: fp32)",
    )
    planner.add_argument(
        "--round-bytes",
        type=int,
        help="rows go to a server in up to three rounds of at least so many bytes on average (default: 2**20)",
    )
    planner.add_argument("--capacity", type=int, help="the most bytes of a rank's arena (default: no limit)")
    planner.add_argument(
        "--no-balance", action="store_true", help="compute every row on the rank that holds it (its home)"
    )
    output = command.add_argument_group("the output")
    output.add_argument(
        "--heap",
        type=int,
        nargs="?",
        const=20,
        metavar="BATCHES",
        help="print the heap_bytes that batches need, instead of a plan; BATCHES of them are drawn, each with the next "
        "seed (20 without a number)",
    )
    output.add_argument(
        "--compare",
        action="store_true",
        help="print balance and bytes of distca and of other strategies on this batch, instead of a plan",
    )
    output.add_argument("--json", type=Path, help="write layout, tasks, transfers and statistics to this file")
    output.add_argument("--plot", type=Path, help="draw loads, traffic and memory to this PNG file (needs matplotlib)")
    add_debug(command)
    command.set_defaults(run=run)


def _ranks(text: str) -> list[int]:
    return [int(rank) for rank in text.split(",")]


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("--plot needs matplotlib: pip install matplotlib")
    if options.compare:
        return compare.run(options, _documents(options, options.seed))
    heads = Heads(options.q_heads, options.kv_heads, options.head_dim, options.value_dim, DTYPES[options.dtype])
    make_plan = functools.partial(
        plan,
        heads=heads,
        mask=options.mask,
        window=options.window,
        servers=options.servers,
        ranks_per_node=options.ranks_per_node,
        tolerance=options.tolerance,
        balance=not options.no_balance,
        cost=CostModel.load(options.cost),
        objective=options.objective,
        split_heads=not options.whole_heads,
        retain_bytes=options.retain_bytes,
        reduce_dtype=DTYPES[options.reduce_dtype],
        round_bytes=options.round_bytes,
        capacity=options.capacity,
        **({} if options.min_rows is None else {"min_rows": options.min_rows}),
    )
    if options.heap is not None:
        print(heap_summary(_batches(options), heads, make_plan))
        return 0
    made = make_plan(layout=_layout(options, options.seed))
    print(summary(made))
    if options.json is not None:
        write_given("--json", options.json, json.dumps(as_json(made)))
    if options.plot is not None:
        from distca.apps.plan.picture import draw_plan

        draw_plan(made, options.plot, ranks_per_node=options.ranks_per_node, capacity=options.capacity)
    return 0


def _batches(options: argparse.Namespace) -> list[Layout]:
    if options.heap < 1:
        raise InvalidArgumentError(f"--heap {options.heap}: at least one batch is needed")
    if options.json is not None or options.plot is not None:
        raise InvalidArgumentError(
            "--heap makes many plans, but --json and --plot take one plan: leave out one or the other"
        )
    if options.capacity is not None:
        raise InvalidArgumentError("--heap finds the capacity itself: leave out --capacity")
    number = 1 if options.workload is not None else options.heap
    return [_layout(options, options.seed + i) for i in range(number)]


def _documents(options: argparse.Namespace, seed: int) -> list[list[int]]:
    """The lengths of each rank's documents."""
    if (options.workload is None) == (options.lengths is None):
        raise InvalidArgumentError("give either --workload or --lengths, and not both")
    if options.workload is not None:
        if (options.ranks, options.tokens_per_rank) != (None, None):
            raise InvalidArgumentError("--ranks and --tokens-per-rank belong to --lengths: a workload has its ranks")
        return read_workload(options.workload)
    if options.ranks is None or options.tokens_per_rank is None:
        raise InvalidArgumentError("--lengths needs --ranks and --tokens-per-rank")
    return draw_documents(read_lengths(options.lengths), options.ranks, options.tokens_per_rank, seed)


def _layout(options: argparse.Namespace, seed: int) -> Layout:
    documents = _documents(options, seed)
    if options.layout != "head-tail" and (options.longer_than, options.context) != (None, None):
        raise InvalidArgumentError("--longer-than and --context belong to --layout head-tail")
    if options.layout == "documents":
        return Layout.from_documents(documents)
    lengths = [length for of_rank in documents for length in of_rank]
    if options.layout == "packed":
        tokens = max((sum(of_rank) for of_rank in documents), default=0)
        return Layout.packed(lengths, ranks=len(documents), tokens_per_rank=tokens)
    if options.layout == "spread":
        return Layout.spread(lengths, ranks=len(documents))
    return Layout.head_tail(
        lengths, ranks=len(documents), longer_than=options.longer_than or 0, context=options.context
    )


def summary(made: Plan) -> str:
    """The plan's effects as a table."""
    stats = made.stats
    arenas = [max(arena.total for arena in of_phase) for of_phase in stats.arena_bytes.values()]
    home_in = max(arena.home_in for of_phase in stats.arena_bytes.values() for arena in of_phase)
    rows = [
        ("ranks, servers", f"{made.layout.num_ranks}, {stats.num_servers}"),
        ("documents", f"{len(made.layout.document_lengths):,}"),
        ("tasks", f"{len(made.tasks):,}, {sum(t.home != t.server for t in made.tasks):,} of them away from home"),
        ("largest / mean load before", f"{stats.imbalance_before:.4f}"),
        ("largest / mean load as planned", f"{stats.imbalance_after:.4f}"),
        ("above the lower bound of any plan", f"{stats.gap:.4%}"),
        ("what keeps the load above the tolerance", stats.binding or "nothing"),
        *(
            (f"{message.replace('_', ' ')}, between nodes", f"{size / 1e9:.3f} GB, {between / 1e9:.3f} GB")
            for (message, size), between in zip(stats.bytes.items(), stats.bytes_between_nodes.values(), strict=True)
        ),
        ("sent by a rank, most, mean", _sent(made)),
        ("largest arena forward, backward", f"{arenas[0] / 1e6:.1f} MB, {arenas[1] / 1e6:.1f} MB"),
        ("rounds of rows to a server, at most", f"{1 + max((t.round for t in made.tasks), default=-1)}"),
        ("largest part for rows that come home", f"{home_in / 1e6:.1f} MB"),
        *([("documents that exchange rows for heads", _head_parallel(stats))] if stats.head_parallel else []),
        *([("kept until backward, at most", _retained(stats))] if made.retains else []),
        ("planned in", f"{stats.plan_ms:.2f} ms"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _sent(made: Plan) -> str:
    """Bytes that leave a rank in forward and backward. A link that carries far more than the mean makes others wait."""
    sent = [0] * made.layout.num_ranks
    for transfer in made.transfers:
        sent[transfer.source] += transfer.bytes
    return f"{max(sent) / 1e6:.1f} MB, {sum(sent) / len(sent) / 1e6:.1f} MB"


def _head_parallel(stats: PlanStats) -> str:
    sizes = stats.head_parallel.values()
    ranks = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{max(sizes)}"
    return f"{len(sizes)}, in groups of {ranks} ranks"


def _retained(stats: PlanStats) -> str:
    saved = f"{stats.saved_bytes / 1e9:.3f} GB of backward in"
    return f"{max(stats.retained_bytes) / 1e6:.1f} MB a rank, which saves {saved}"


def as_json(made: Plan) -> dict[str, Any]:
    """The plan as JSON, with all that is needed to check its claims without this library.

    Documents are numbered over the ranks in order. ``load`` is in cost units (visible pairs by default) times query
    heads. ``src`` is the rank whose memory the bytes leave. Rows are those of the document; heads are key/value heads.
    """
    stats = made.stats
    return {
        "layout": [
            [{"doc": doc, "begin": begin, "end": end} for doc, begin, end in made.layout.segments(rank)]
            for rank in range(made.layout.num_ranks)
        ],
        "mask": made.mask,
        "window": made.window,
        "heads": {
            "q": made.heads.q,
            "kv": made.heads.kv,
            "dim": made.heads.dim,
            "value_dim": made.heads.value_dim,
            "dtype": str(made.heads.dtype).removeprefix("torch."),
        },
        "tasks": [
            {
                "doc": t.document,
                "q": [t.q_begin, t.q_end],
                "kv": [t.kv_begin, t.kv_end],
                "kv_heads": [t.kv_head_begin, t.kv_head_end],
                "server": t.server,
            }
            for t in made.tasks
        ],
        "transfers": [
            {
                "message": t.message,
                "src": t.source,
                "dst": t.target,
                "doc": t.document,
                "rows": [t.begin, t.end],
                "kv_heads": [t.kv_head_begin, t.kv_head_end],
                "tensor": t.tensor,
                "bytes": t.bytes,
            }
            for t in made.transfers
        ],
        "stats": {
            "load_before": stats.load_before,
            "load": stats.load,
            "lower_bound": stats.lower_bound,
            "bytes_lower_bound": stats.bytes_lower_bound,
            "bytes_between_nodes_lower_bound": stats.bytes_between_nodes_lower_bound,
            "binding": stats.binding,
            "head_parallel": stats.head_parallel,
            "bytes": stats.bytes,
            "bytes_between_nodes": stats.bytes_between_nodes,
            "retained_bytes": stats.retained_bytes,
            "saved_bytes": stats.saved_bytes,
            "plan_ms": stats.plan_ms,
        },
    }
