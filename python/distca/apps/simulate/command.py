"""The command `distca simulate`: models a training step by several strategies, and prints, writes or draws it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.apps.common import pictures
from distca.apps.common.files import write_given
from distca.apps.common.options import add_debug
from distca.apps.common.sources import find_source
from distca.apps.common.workloads import draw_documents, pretrain_lengths, read_lengths
from distca.apps.simulate import searching, sweep
from distca.errors import InvalidArgumentError
from distca.heads import DTYPES
from distca.simulator.case import Documents
from distca.simulator.reading import read_cluster, read_model, read_parallelism
from distca.simulator.setup import Cluster, Model, Parallelism
from distca.simulator.simulate import StrategyResult, simulate, spans_of
from distca.simulator.strategies import STRATEGIES
from distca.simulator.validation import errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "dense": pictures.COMPUTE,
    "attention": pictures.ATTEND,
    "copy": pictures.ROWS,
    "wait": pictures.WAIT,
    "optimizer": pictures.OPTIMIZER,
}
_MOST_DOCUMENTS = 1_000_000  # of a step
_MOST_ROWS = 16  # homes of a timeline


def add_command(commands: Any) -> None:
    """Adds `simulate` to the parser of the command line."""
    command = commands.add_parser(
        "simulate",
        help="model a training step on a cluster, by several strategies",
        description="Models a training step on your documents, model and cluster: without balance, by other ways to "
        "balance, and by distca, side by side. Nothing runs and nothing is measured; the plans are real. "
        "docs/simulator.md says what is modelled, and how far it is from runs and from published figures.",
    )
    batch = command.add_argument_group("the documents")
    batch.add_argument(
        "--lengths",
        default="pretrain",
        help="a JSON list of document lengths in tokens; or a folder or .jsonl file that `distca train` reads, a byte "
        "of text being a token; or pretrain, the list published with DistCA (default: pretrain)",
    )
    batch.add_argument(
        "--tokens-per-rank",
        type=int,
        default=131072,
        help="tokens of each data x context rank in a micro-batch; documents are drawn until it is full (default: "
        "131072)",
    )
    batch.add_argument(
        "--steps",
        type=int,
        default=1,
        help="steps with documents of their own; figures are means over them, and WLB-LLM moves documents between them "
        "(default: 1)",
    )
    batch.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    setup = command.add_argument_group("the model and the cluster")
    setup.add_argument("--model", default="llama-8b", help="llama-8b, llama-34b or a config.json (default: llama-8b)")
    setup.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations (default: bf16)")
    setup.add_argument(
        "--cluster", default="h200-ib400", help="h200-ib400, cpu-2, or a TOML or JSON file (default: h200-ib400)"
    )
    setup.add_argument("--gpus", type=int, help="ranks of the cluster (default: those of its file)")
    setup.add_argument("--parallelism", type=Path, help="a TOML or JSON file with the options below, without dashes")
    for name in ("data", "context", "tensor", "pipeline", "micro-batches", "chunks"):
        default = "; by default what is left of the ranks" if name == "data" else "; by default 1"
        setup.add_argument(f"--{name}", type=int, help=f"see docs/simulator.md{default}")
    setup.add_argument("--fsdp", action="store_true", help="shard weights over the data and context ranks")
    setup.add_argument("--recompute", action="store_true", help="run a layer's forward again in its backward")
    setup.add_argument(
        "--save-attention",
        action="store_true",
        help="with --recompute: core attention is not run again, as in `distca train`",
    )
    setup.add_argument(
        "--whole-optimizer", action="store_true", help="every rank takes the whole optimizer step, as with DDP"
    )
    setup.add_argument(
        "--strategies", help=f"some of {','.join(STRATEGIES)} (default: all that the parallelism allows)"
    )
    setup.add_argument("--tolerance", type=float, default=0.05, help="that of distca's plans (default: 0.05)")
    setup.add_argument(
        "--search",
        action="store_true",
        help="find every strategy's best parallelism under the memory limit; what is given above stays fixed",
    )
    setup.add_argument(
        "--sequences",
        type=int,
        help="with --search: sequences of a step, each of --tokens-per-rank tokens (default: 65,536 tokens a GPU)",
    )
    output = command.add_argument_group("the output")
    output.add_argument("--json", type=Path, help="write the results to this file")
    output.add_argument(
        "--plot",
        type=Path,
        help="draw idle shares and timelines, or with --sweep speed-ups, to this PNG file (needs matplotlib)",
    )
    output.add_argument(
        "--sweep",
        help="gpus=16,32,64 or longest=32768,65536: simulate each, and print speed-ups; lengths are multiplied so that "
        "the longest document has so many tokens",
    )
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("--plot needs matplotlib: pip install matplotlib")
    if options.sequences is not None and (not options.search or options.sequences < 1):
        raise InvalidArgumentError(f"--sequences {options.sequences}: a positive number, with --search, is allowed")
    if options.search:
        return _search(options)
    if options.sweep is not None:
        return _sweep(options)
    made = _made(options, options.gpus)
    print(table(made.results))
    _write(options.json, made.as_json())
    if options.plot is not None:
        draw(made.results, options.plot)
    return 0


@dataclasses.dataclass(frozen=True)
class _Simulated:
    """What was simulated, and its results."""

    cluster: Cluster
    model: Model
    parallelism: Parallelism
    documents: list[Documents]  # of each step
    results: list[StrategyResult]

    def as_json(self) -> dict[str, Any]:
        """All of it, marked as modelled."""
        values = {name: dataclasses.asdict(getattr(self, name)) for name in ("cluster", "model", "parallelism")}
        results = [result.as_json() for result in self.results]
        return {
            "kind": "modelled",
            **values,
            "documents": self.documents[0],
            "following": self.documents[1:],
            "results": results,
        }


def _made(options: argparse.Namespace, gpus: int | None, longest: int | None = None) -> _Simulated:
    """Simulates what the options say, on so many ranks and with so long documents."""
    cluster = read_cluster(options.cluster, gpus)
    model = dataclasses.replace(read_model(options.model), dtype=options.dtype)
    parallelism = _parallelism(options, cluster.ranks)
    parallelism.check(cluster, model)
    lengths = _lengths(options.lengths)
    if longest is not None:
        lengths = sweep.scaled(lengths, longest)
    if options.steps < 1:
        raise InvalidArgumentError(f"--steps {options.steps}: a positive number is expected")
    _check_number(lengths, parallelism, options.tokens_per_rank)
    seeds = itertools.count(options.seed)
    documents = [
        [
            draw_documents(lengths, parallelism.homes, options.tokens_per_rank, next(seeds))
            for _ in range(parallelism.micro_batches)
        ]
        for _ in range(options.steps)
    ]
    results = simulate(
        documents[0],
        cluster=cluster,
        model=model,
        parallelism=parallelism,
        strategies=None if options.strategies is None else options.strategies.split(","),
        tolerance=options.tolerance,
        record=options.plot is not None and options.sweep is None,
        following=documents[1:],
    )
    return _Simulated(cluster, model, parallelism, documents, results)


def _sweep(options: argparse.Namespace) -> int:
    name, values = sweep.parse(options.sweep)
    if name == "gpus" and options.gpus is not None:
        raise InvalidArgumentError("--sweep gpus=... has the numbers of ranks: leave out --gpus")
    made = {value: _made(options, value) if name == "gpus" else _made(options, options.gpus, value) for value in values}
    found = {value: one.results for value, one in made.items()}
    print(sweep.table(name, found))
    _write(options.json, {"kind": "modelled", "swept": name, "steps": {v: one.as_json() for v, one in made.items()}})
    if options.plot is not None:
        sweep.draw(name, found, options.plot)
    return 0


def _search(options: argparse.Namespace) -> int:
    cluster = read_cluster(options.cluster, options.gpus)
    model = dataclasses.replace(read_model(options.model), dtype=options.dtype)
    made = searching.searched(options, cluster, model, _lengths(options.lengths))
    print(searching.table(made))
    _write(options.json, made.as_json())
    if options.plot is not None:
        searching.draw(made, options.plot)
    return 0


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        write_given("--json", path, json.dumps(content, indent=1) + "\n")


def _parallelism(options: argparse.Namespace, ranks: int) -> Parallelism:
    """The parallelism of the options, or that of the file."""
    names = ("data", "context", "tensor", "pipeline", "micro_batches", "chunks")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given |= {name: True for name in ("fsdp", "recompute", "save_attention") if getattr(options, name)}
    given |= {"shard_optimizer": False} if options.whole_optimizer else {}
    if options.parallelism is not None:
        if given:
            raise InvalidArgumentError(f"--parallelism is given, and --{next(iter(given)).replace('_', '-')} as well")
        return read_parallelism(options.parallelism)
    made = Parallelism(**given)
    if "data" in given:
        return made
    others = made.context * made.tensor * made.pipeline
    return dataclasses.replace(made, data=max(1, ranks // others))


def _lengths(source: str) -> list[int]:
    if source == "pretrain":
        return read_lengths(pretrain_lengths())
    path = Path(source)
    if path.suffix == ".json":
        return read_lengths(path)
    lengths = [len(document) for document in find_source(path).documents() if document]
    if not lengths:
        raise InvalidArgumentError(f"--lengths {source}: there are no documents in it")
    return lengths


def _check_number(lengths: list[int], parallelism: Parallelism, tokens_per_rank: int) -> None:
    """Raises InvalidArgumentError if a step would have so many documents that planning it takes very long."""
    if not lengths or tokens_per_rank < 1:
        return  # draw_documents says so
    drawn = statistics.mean(min(max(n, 2), tokens_per_rank) for n in lengths)
    number = parallelism.homes * parallelism.micro_batches * tokens_per_rank / drawn
    if number > _MOST_DOCUMENTS:
        raise InvalidArgumentError(
            f"--tokens-per-rank {tokens_per_rank}: a step would have {number:,.0f} documents, which have {drawn:,.0f} "
            f"tokens on average; at most {_MOST_DOCUMENTS:,} are simulated: draw fewer tokens, or give longer documents"
        )


def table(results: list[StrategyResult]) -> str:
    """The results side by side."""
    lines = [
        f"{'modelled, not measured':22} {'step':>9} {'relative':>8} {'interval':>13} {'tokens/s':>11} {'MFU':>6} "
        f"{'idle: most':>10} {'mean':>6} {'attention':>9} {'fill':>6} {'exposed':>8} {'in nodes':>10} {'between':>10} "
        f"{'memory':>8} {'padding':>8}"
    ]
    for result in results:
        ratio = result.seconds / results[0].seconds
        interval = "" if result is results[0] else f"{errors().of_ratio(ratio, alike=True)}"
        lines.append(
            f"{result.strategy:22} {result.seconds:8.3f}s {ratio:8.3f} {interval:>13} "
            f"{result.tokens_per_second:11,.0f} {result.mfu:6.1%} {max(result.idle):10.1%} "
            f"{statistics.mean(result.idle):6.1%} {result.idle_by_cause.attention:9.1%} "
            f"{result.idle_by_cause.fill:6.1%} {result.exposed_communication:8.1%} "
            f"{result.bytes_inside / 1e9:7,.0f} GB {result.bytes_between / 1e9:7,.0f} GB "
            f"{result.memory.total / 1e9:5,.0f} GB {result.padding:8.1%}{'' if result.fits else ' (does not fit)'}"
        )
    return "\n".join(lines)


def draw(results: list[StrategyResult], path: Path) -> None:
    """Draws each strategy's idle shares, and its timeline.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    from matplotlib.patches import Patch

    figure = pictures.new_figure(15, 0.6 + 2.6 * len(results), 110)
    grid = figure.subplots(len(results), 2, width_ratios=(1, 3), squeeze=False)
    longest = max(result.seconds for result in results)
    for (shares, timeline), result in zip(grid, results, strict=True):
        shares.step(range(len(result.idle) + 1), [*result.idle, result.idle[-1]], where="post", color=pictures.WAIT)
        shares.set_ylim(0, 1)
        shares.set_xlabel("rank")
        pictures.plain(shares, f"{result.strategy}: idle share (modelled)", grid=True)
        _draw_timeline(timeline, result, longest)
    keys = [Patch(color=colour, label=what) for what, colour in _COLOURS.items()]
    pictures.legend_below(figure, keys)
    pictures.save(figure, path, "--plot")


def _draw_timeline(axes: Axes, result: StrategyResult, longest: float) -> None:
    homes = range(min(len(result.idle), _MOST_ROWS))
    for home in homes:
        spans = spans_of(result.events, home)
        for what, colour in _COLOURS.items():
            bars = [(begin, end - begin) for kind, begin, end in spans if kind == what]
            axes.broken_barh(bars, (home - 0.4, 0.8), facecolors=colour)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(homes) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_ylabel("rank")
    pictures.plain(axes, f"{result.strategy}: {result.seconds:.3f} s (modelled)")
