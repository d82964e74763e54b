"""`distca plan`: what it writes is enough to check the plan without the library, and mistakes are named."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import distca
from distca.apps.cli import main
from distca.apps.common.workloads import draw_documents

LENGTHS = [5, 64, 300, 17, 1200, 2, 90, 33]
DRAW = ["--ranks", "4", "--tokens-per-rank", "1500", "--seed", "3"]
MODEL = ["--q-heads", "8", "--kv-heads", "2", "--head-dim", "16", "--value-dim", "24"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(LENGTHS))
    return path


def _plan(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    assert main(["plan", *MODEL, *arguments, "--json", str(path)]) == 0
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _visible(plan: dict[str, Any], length: int, row: int) -> int:
    """The number of keys that a row sees."""
    before, after = row + 1, length - row - 1
    window = plan["window"] or length
    return min(before, window) + (min(after, window - 1) if plan["mask"] == "full" else 0)


def _check_loads(plan: dict[str, Any]) -> None:
    lengths: dict[int, int] = defaultdict(int)
    home = {}
    before = [0] * len(plan["layout"])
    for rank, segments in enumerate(plan["layout"]):
        for s in segments:
            lengths[s["doc"]] = max(lengths[s["doc"]], s["end"])
            home |= {(s["doc"], row): rank for row in range(s["begin"], s["end"])}
    for (doc, row), rank in home.items():
        before[rank] += _visible(plan, lengths[doc], row) * plan["heads"]["q"]
    group = plan["heads"]["q"] // plan["heads"]["kv"]
    load = [0] * len(before)
    computed = set()
    for t in plan["tasks"]:
        heads = range(*t["kv_heads"])
        for row in range(*t["q"]):
            load[t["server"]] += _visible(plan, lengths[t["doc"]], row) * len(heads) * group
            for head in heads:
                assert (t["doc"], row, head) not in computed
                computed.add((t["doc"], row, head))
    assert len(computed) == len(home) * plan["heads"]["kv"]
    assert plan["stats"]["load_before"] == before
    assert plan["stats"]["load"] == load


def _check_transfers(plan: dict[str, Any]) -> None:
    """A row that a task needs from elsewhere comes from its home, and every result goes back there."""
    home = {
        (s["doc"], row): rank
        for rank, segments in enumerate(plan["layout"])
        for s in segments
        for row in range(s["begin"], s["end"])
    }
    needed: set[tuple[Any, ...]] = set()
    servers_of_key = defaultdict(set)
    for t in plan["tasks"]:
        for head in range(*t["kv_heads"]):
            for row in range(*t["kv"]):
                servers_of_key[(t["doc"], row, head)].add(t["server"])
            for row in range(*t["q"]):
                at, server = home[(t["doc"], row)], t["server"]
                if at == server:
                    continue
                for message, tensors in (("forward_in", ["q"]), ("backward_in", ["q", "dout", "lse", "delta"])):
                    needed |= {(message, at, server, tensor, t["doc"], row, head) for tensor in tensors}
                for message, tensors in (("forward_out", ["out", "lse"]), ("backward_out", ["dq"])):
                    needed |= {(message, server, at, tensor, t["doc"], row, head) for tensor in tensors}
    for (doc, row, head), servers in servers_of_key.items():
        at = home[(doc, row)]
        for server in servers - {at}:
            needed |= {(m, at, server, kind, doc, row, head) for m in ("forward_in", "backward_in") for kind in "kv"}
            needed |= {("backward_out", server, at, kind, doc, row, head) for kind in ("dk", "dv")}
    listed = set()
    element = {"float32": 4, "bfloat16": 2}[plan["heads"]["dtype"]]
    group = plan["heads"]["q"] // plan["heads"]["kv"]
    width = {"q": "dim", "k": "dim", "dq": "dim", "dk": "dim"}
    total: dict[str, int] = defaultdict(int)
    for t in plan["transfers"]:
        size = 0
        for row in range(*t["rows"]):
            for head in range(*t["kv_heads"]):
                item = (t["message"], t["src"], t["dst"], t["tensor"], t["doc"], row, head)
                assert item not in listed
                listed.add(item)
                if t["tensor"] in ("lse", "delta"):
                    size += 4 * group
                    continue
                shared = t["tensor"] in ("dk", "dv") and len(servers_of_key[(t["doc"], row, head)]) > 1
                heads = 1 if t["tensor"] in ("k", "v", "dk", "dv") else group
                dim = plan["heads"][width.get(t["tensor"], "value_dim")]
                size += heads * dim * (4 if shared else element)
        assert t["bytes"] == size
        total[t["message"]] += size
    assert listed == needed
    assert plan["stats"]["bytes"] == {message: total[message] for message in plan["stats"]["bytes"]}
    assert sum(total.values()) > 0


@pytest.mark.parametrize(
    "options",
    [
        ["--layout", "documents"],
        ["--layout", "packed", "--dtype", "fp32", "--window", "100"],
        ["--layout", "head-tail", "--mask", "full", "--tolerance", "0"],
        ["--mask", "full", "--window", "100", "--tolerance", "0"],
        ["--layout", "head-tail", "--longer-than", "400", "--context", "2"],
        ["--layout", "spread"],
        ["--layout", "documents", "--servers", "1,2", "--min-rows", "1"],
    ],
    ids=" ".join,
)
def test_a_stranger_can_check_every_claim_from_the_json_alone(
    options: list[str], lengths: Path, tmp_path: Path
) -> None:
    plan = _plan(tmp_path, "--lengths", str(lengths), *DRAW, *options)
    _check_loads(plan)
    _check_transfers(plan)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--layout", "head-tail"], {"longer_than": 0, "context": None}),
        (["--layout", "head-tail", "--longer-than", "250", "--context", "2"], {"longer_than": 250, "context": 2}),
        (["--layout", "spread"], None),
    ],
    ids=str,
)
def test_documents_lie_where_the_layout_puts_them(
    options: list[str], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    workload, lengths = tmp_path / "workload.json", [2000, 300, 200, 100, 100, 100, 100, 100]
    documents = [lengths[:1], lengths[1:4], lengths[4:7], lengths[7:]]
    workload.write_text(json.dumps({"ranks": 4, "tokens_per_rank": 2000, "documents": documents}))
    if expected is None:
        layout = distca.Layout.spread(lengths, ranks=4)
    else:
        layout = distca.Layout.head_tail(lengths, ranks=4, **expected)
    plan = _plan(tmp_path, "--workload", str(workload), *options)
    found = [[(s["doc"], s["begin"], s["end"]) for s in of_rank] for of_rank in plan["layout"]]
    assert found == [layout.segments(rank) for rank in range(4)]


@pytest.mark.parametrize("option", [["--longer-than", "0"], ["--context", "2"]], ids=str)
@pytest.mark.parametrize("layout", ["documents", "packed", "spread"])
def test_options_of_head_tail_need_it(
    option: list[str], layout: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--lengths", str(lengths), *DRAW, "--layout", layout, *option]) == 2
    assert "--longer-than and --context belong to --layout head-tail" in capsys.readouterr().err


def test_the_table_says_what_the_busiest_rank_sends(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _plan(tmp_path, "--lengths", str(lengths), *DRAW)
    sent = [sum(t["bytes"] for t in plan["transfers"] if t["src"] == rank) for rank in range(len(plan["layout"]))]
    expected = f"{max(sent) / 1e6:.1f} MB, {sum(sent) / len(sent) / 1e6:.1f} MB"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sent by a rank, most, mean ")]
    assert max(sent) > 0 and line.endswith(f" {expected}")


def test_a_workload_file_says_which_documents_every_rank_has(tmp_path: Path) -> None:
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"ranks": 2, "tokens_per_rank": 30, "documents": [[10, 20], [30]]}))
    plan = _plan(tmp_path, "--workload", str(workload), "--no-balance")
    assert plan["layout"] == [
        [{"doc": 0, "begin": 0, "end": 10}, {"doc": 1, "begin": 0, "end": 20}],
        [{"doc": 2, "begin": 0, "end": 30}],
    ]
    assert plan["stats"]["load"] == [8 * (55 + 210), 8 * 465]


def test_drawn_documents_fill_every_rank_and_follow_from_the_seed() -> None:
    drawn = draw_documents(LENGTHS, 5, 1000, seed=1)
    assert [sum(of_rank) for of_rank in drawn] == [1000] * 5
    assert all(length % 2 == 0 for of_rank in drawn for length in of_rank)
    assert drawn == draw_documents(LENGTHS, 5, 1000, seed=1) != draw_documents(LENGTHS, 5, 1000, seed=2)


def test_the_picture_and_the_table_are_made(lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert main(["plan", "--lengths", str(lengths), *DRAW, "--ranks-per-node", "2", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "largest / mean load as planned" in printed and "between nodes" in printed


def test_the_picture_shows_nodes_memory_and_capacity_and_a_legend_that_covers_nothing(
    lengths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    from distca.apps.common import pictures
    from distca.apps.plan.picture import draw_plan

    saved = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, path: saved.append(self))
    layout = distca.Layout.from_documents([[1200, 300], [64, 17], [90, 33], [700]])
    made = distca.plan(layout, distca.Heads(8, 2, 16))
    draw_plan(made, tmp_path / "plan.png", ranks_per_node=2, capacity=10 * made.stats.slot_bytes)
    (figure,) = saved
    loads, traffic, memory, _ = figure.axes
    assert [list(line.get_ydata()) for line in traffic.lines] == [[1.5, 1.5], [0, 1]]  # a border across, and one down
    heights = [bar.get_height() * 1e6 for bar in memory.patches]
    assert heights == pytest.approx(
        [a.total for phase in ("forward", "backward") for a in made.stats.arena_bytes[phase]]
    )
    assert memory.lines[0].get_ydata()[0] * 1e6 == pytest.approx(10 * made.stats.slot_bytes)
    assert memory.get_ylim()[1] > memory.lines[0].get_ydata()[0]
    # A run's report uses the same colours.
    assert [bar.get_facecolor() for bar in loads.patches[::4]] == [
        figure_module.mpl.colors.to_rgba(colour) for colour in (pictures.AT_HOME, pictures.PLANNED)
    ]
    assert [axes.get_legend() for axes in figure.axes] == [None] * 4
    figure.draw_without_rendering()
    below = figure.legends[0].get_window_extent()
    assert not any(below.overlaps(axes.get_tightbbox()) for axes in figure.axes)


def test_a_capacity_is_kept_to_and_does_not_go_with_a_search_for_it(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = _plan(tmp_path, "--lengths", str(lengths), *DRAW)
    assert free["stats"]["binding"] is None
    tight = _plan(tmp_path, "--lengths", str(lengths), *DRAW, "--capacity", "500000")
    assert tight["stats"]["binding"].startswith("capacity of rank")
    assert main(["plan", "--lengths", str(lengths), *DRAW, "--capacity", "500000", "--heap"]) == 2
    assert "leave out --capacity" in capsys.readouterr().err


def test_it_says_what_servers_would_keep_and_what_that_saves(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent_again = _plan(tmp_path, "--lengths", str(lengths), *DRAW)
    assert "kept until backward" not in capsys.readouterr().out
    kept = _plan(tmp_path, "--lengths", str(lengths), *DRAW, "--retain-bytes", "100000000")
    saved = sent_again["stats"]["bytes"]["backward_in"] - kept["stats"]["bytes"]["backward_in"]
    again = sum(t["bytes"] for t in sent_again["transfers"] if t["message"] == "backward_in" and t["tensor"] in "kv")
    assert saved == again == kept["stats"]["saved_bytes"] > 0
    assert not [t for t in kept["transfers"] if t["message"] == "backward_in" and t["tensor"] in "kv"]
    most = max(kept["stats"]["retained_bytes"])
    said = f"{most / 1e6:.1f} MB a rank, which saves {saved / 1e9:.3f} GB of backward in"
    assert "kept until backward, at most" in (printed := capsys.readouterr().out) and said in printed


def test_rounded_contributions_are_fewer_bytes(lengths: Path, tmp_path: Path) -> None:
    options = ("--lengths", str(lengths), *DRAW, "--no-balance", "--layout", "head-tail")
    wide, narrow = (_plan(tmp_path, *options, *more)["stats"]["bytes"] for more in ((), ("--reduce-dtype", "bf16")))
    assert narrow == wide | {"backward_out": narrow["backward_out"]}
    assert narrow["backward_out"] < wide["backward_out"]


@pytest.mark.parametrize(
    ("lengths_of_ranks", "said"),
    [([[16384, 32768], *[[]] * 7], "2, in groups of 8 ranks"), ([[16384], *[[]] * 8], "1, in groups of 5 ranks")],
)
def test_it_says_how_many_documents_exchange_rows_for_heads(
    lengths_of_ranks: list[list[int]], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({"documents": lengths_of_ranks}))
    options = ["--workload", str(path), "--q-heads", "8", "--kv-heads", "8"]
    assert main(["plan", *options]) == 0
    assert "exchange rows for heads" not in capsys.readouterr().out
    assert main(["plan", *options, "--layout", "head-tail"]) == 0
    assert f"documents that exchange rows for heads   {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "either --workload or --lengths"),
        (["--lengths", "{lengths}"], "--ranks and --tokens-per-rank"),
        (["--lengths", "{folder}/none.json", *DRAW], "cannot be read"),
        (["--lengths", "{lengths}", "--ranks", "0", "--tokens-per-rank", "4"], "ranks = 0"),
        (["--lengths", "{lengths}", "--ranks", "1", "--tokens-per-rank", "3"], "tokens_per_rank = 3; an even"),
        (["--lengths", "{lengths}", *DRAW, "--tolerance", "nan"], "tolerance = nan"),
        (["--lengths", "{lengths}", *DRAW, "--q-heads", "7"], "7 query heads"),
        (["--lengths", "{lengths}", *DRAW, "--servers", "4"], "servers = [4]; ranks from 0 to 3"),
        (["--lengths", "{lengths}", *DRAW, "--retain-bytes", "-1"], "retain_bytes = -1"),
        (["--lengths", "{lengths}", *DRAW, "--reduce-dtype", "fp16"], "reduce_dtype = torch.float16"),
        (
            ["--lengths", "{lengths}", *DRAW, "--json", "{folder}/no/x.json"],
            "no/x.json cannot be written: No such file",
        ),
        (["--lengths", "{lengths}", *DRAW, "--json", "/dev/full"], "--json /dev/full cannot be written: No space left"),
        (["--lengths", "{lengths}", "--ranks", "2147483648", "--tokens-per-rank", "2"], "1 to 2^20 are allowed"),
        (["--workload", "{lengths}"], '"documents"'),
        (["--workload", "{lengths}", "--ranks", "4"], "--ranks and --tokens-per-rank belong to --lengths"),
    ],
    ids=str,
)
def test_mistakes_are_named(
    arguments: list[str], said: str, lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [a.format(lengths=lengths, folder=tmp_path) for a in arguments]
    assert main(["plan", *filled]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("length", [0, -5, 2**31 + 1, 1.5, "7", True, None])
def test_a_length_that_is_none_is_refused_with_its_document_and_rank(
    length: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"documents": [[8], [4, length]]}))
    assert main(["plan", "--workload", str(workload)]) == 2
    assert f"rank 1, document 1 has length {length!r}; 1 to 2^31" in capsys.readouterr().err
