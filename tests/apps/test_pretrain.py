"""`pretrain_llama.py` computes what it computes with Megatron's schedule and attention, and goes on where it ended."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import distca
from distca.apps.common.corpus import Corpus
from distca.apps.common.memory_log import MemoryLog
from distca.apps.common.options import exit_code
from distca.apps.common.stopping import StopRequest
from distca.apps.pretrain import cli
from distca.apps.pretrain.data import MicroBatches, read_documents
from distca.apps.pretrain.log import RunLog, Step
from distca.apps.pretrain.options import Options, parse
from distca.apps.pretrain.shapes import SHAPES, shape_of
from distca.connect.launch import RankError
from distca.errors import InvalidArgumentError
from support.pretrained import QWEN3, check_both, folder_of_runs, log_of, run_all, runs_of_both, variables_of
from support.ranks import launch
from support.train_runs import one_rank

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

#: Ways to share the model among two and among four processes. `make pretraining` has more of the latter.
TWO = {
    "data": {"MICRO_BATCHES": "2"},
    "stages": {"PP_SIZE": "2", "EVAL_FRACTION": "0.2", "EVAL_EVERY": "2", "EVAL_STEPS": "1"},
    "virtual stages, recomputed": {"PP_SIZE": "2", "VPP_SIZE": "2", "RECOMPUTE": "full"},
    "Qwen3": {"TP_SIZE": "2", "MODEL": "qwen3"},
    "stages, ping-pong": {"PP_SIZE": "2", "PING_PONG": "1", "RECOMPUTE": "full", "EVAL_FRACTION": "0.2"},
}
FOUR = {
    "tensor, sequence, ping-pong": {
        **{"TP_SIZE": "2", "PP_SIZE": "2", "VPP_SIZE": "2", "SEQUENCE_PARALLEL": "1"},
        **{"RECOMPUTE": "selective", "PING_PONG": "1"},
    },
    "context, stages": {
        **{"CP_SIZE": "2", "PP_SIZE": "2", "PING_PONG": "1"},
        **{"MAX_DOCUMENT": "190", "EVAL_FRACTION": "0.2", "EVAL_EVERY": "2"},
    },
    "head-tail, tensor, sequence": {
        **{"CP_SIZE": "2", "TP_SIZE": "2", "SEQUENCE_PARALLEL": "1", "HOMES": "head-tail", "TOKENS_PER_RANK": "102"}
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_runs(tmp_path_factory)


@pytest.fixture(scope="module")
def all_runs(folder: Path) -> None:
    """Takes all runs, of which there are then the logs."""
    cache = folder / "cache"
    resumed = [
        ("resumed", variables_of(folder, changes))
        for changes in (
            {"PP_SIZE": "2", "SAVE_EVERY": "2"},
            {"TP_SIZE": "2", "FORGOTTEN": "3"},
            {"PP_SIZE": "2", "VPP_SIZE": "2", "FORGOTTEN": "3"},
            {"MICRO_BATCHES": "2", "FORGOTTEN": "3"},
            {"MICRO_BATCHES": "2", "FORGOTTEN": "3", "LR": "1e-3"},
        )
    ]
    launch(run_all, folder, cache, [*runs_of_both(folder, TWO), *resumed], ranks=2)
    launch(run_all, folder, cache, runs_of_both(folder, FOUR), ranks=4)


@pytest.mark.usefixtures("all_runs")
@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_losses_and_norms_are_those_of_megatrons_schedule(folder: Path, name: str) -> None:
    check_both(folder, name, (TWO | FOUR)[name])


@pytest.mark.usefixtures("all_runs")
def test_a_run_goes_on_at_another_split(folder: Path) -> None:
    logs = [log_of(folder / f"resumed {number}") for number in range(4)]
    assert [[step["lr"] for step in log] for log in logs[1:]] == [[step["lr"] for step in logs[0]]] * 3
    losses = [[step["loss"] for step in log] for log in logs]
    for of_run in losses[1:]:  # the third step again, by tensor ranks, by virtual stages, and by data ranks
        assert of_run[:2] == losses[0][:2]
        assert of_run[2] == pytest.approx(losses[0][2], rel=1e-5)


@pytest.mark.usefixtures("all_runs")
def test_a_run_that_goes_on_takes_the_learning_rate_that_it_is_given(folder: Path) -> None:
    assert [log_of(folder / f"resumed {number}")[2]["lr"] for number in (3, 4)] == pytest.approx([3e-4, 1e-4])


CORPUS = Corpus.of([list(range(10)), list(range(100, 107)), [50], list(range(200, 225))])


def _slots(count: int, **changes: Any) -> list[dict[str, torch.Tensor]]:
    given: dict[str, Any] = {"rank": 0, "ranks": 1, "micro_batches": 2, "tokens": 8, "longest": 6, "vocabulary": 256}
    return list(itertools.islice(MicroBatches(CORPUS, seed=3, **(given | changes)), count))


def test_micro_batches_are_full_and_cut_documents_where_asked() -> None:
    slots = _slots(40)
    for slot in slots:
        sizes = slot["cu_seqlens"].diff().tolist()
        assert sum(sizes) == 8 == slot["tokens"].numel() and max(sizes) <= 6 and min(sizes) > 0
        expected = [position for size in sizes for position in range(size)]
        assert slot["position_ids"].tolist() == [expected]
        for token, label, counts in zip(*(slot[n][0].tolist() for n in ("tokens", "labels", "loss_mask")), strict=True):
            assert counts == (token not in (9, 106, 50, 224))  # the last tokens of documents have no target
            assert label == (token + 1 if counts else 0)
    first_epoch = [token for slot in slots for token in slot["tokens"][0].tolist()][: 10 + 7 + 1 + 25]
    assert sorted(first_epoch) == [*range(10), 50, *range(100, 107), *range(200, 225)]


def test_micro_batches_depend_on_the_product_of_ranks_and_micro_batches_alone() -> None:
    whole = [slot["tokens"].tolist() for slot in _slots(12)]
    for ranks, micro_batches in ((2, 1), (2, 3), (3, 1)):
        of_ranks = [_slots(12 // ranks, rank=rank, ranks=ranks, micro_batches=micro_batches) for rank in range(ranks)]
        dealt = [slot["tokens"].tolist() for slots in zip(*of_ranks, strict=True) for slot in slots]
        assert dealt == whole
    assert [slot["tokens"].tolist() for slot in _slots(8, start=2)] == whole[4:]


def _over_all(lengths: list[int], ranks: int) -> distca.Layout:
    return distca.Layout.head_tail(lengths, ranks=ranks)


def _rows(slot: dict[str, torch.Tensor]) -> list[tuple[int, int, float]]:
    """Tokens with their labels and whether they count, without padding."""
    names = ("tokens", "labels", "loss_mask")
    return [row for row in zip(*(slot[name][0].tolist() for name in names), strict=True) if row[0] or row[2]]


def test_a_slot_may_lie_on_several_ranks() -> None:
    """Its documents then go on on the next rank."""
    whole = _slots(8, tokens=24, longest=20, micro_batches=1)
    for place in range(3):
        parts = _slots(8, rank=place, ranks=3, context=3, longest=20, micro_batches=1)
        for slot, part in zip(whole, parts, strict=True):
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert part[name].tolist() == slot[name][:, 8 * place : 8 * place + 8].tolist()
            begins = slot["cu_seqlens"].tolist()
            ends = [*begins, 24]
            first, *others = part["segments"].tolist()
            assert (first[1] > 0) == (8 * place not in begins)
            assert all(begin == 0 for _, begin, _ in others)
            assert [number for number, _, _ in (first, *others)] == [
                n for n in range(len(ends) - 1) if ends[n] < 8 * place + 8 and ends[n + 1] > 8 * place
            ]
            inside = [begin - 8 * place for begin in begins if 8 * place < begin < 8 * place + 8]
            assert part["cu_seqlens"].tolist() == [0, *inside, 8]


def test_a_slot_may_be_cut_head_tail() -> None:
    whole = _slots(8, tokens=24, longest=20, micro_batches=1)
    options = {"ranks": 3, "context": 3, "longest": 20, "micro_batches": 1, "cut": _over_all, "multiple": 4}
    of_ranks = [_slots(8, rank=rank, **options) for rank in range(3)]
    for slot, *parts in zip(whole, *of_ranks, strict=True):
        assert sorted(row for part in parts for row in _rows(part)) == sorted(_rows(slot))
        assert [part["tokens"].numel() % 4 for part in parts] == [0, 0, 0]
        keys = [int((part["position_ids"] * part["loss_mask"]).sum()) for part in parts]
        assert max(keys) - min(keys) < 24  # equal attention
        told = [segment for part in parts for segment in part["segments"].tolist() if segment[0] >= 0]
        for number, length in enumerate(slot["lengths"].tolist()):
            rows = sorted(row for n, begin, end in told if n == number for row in range(begin, end))
            assert rows == [*range(length)]
        for part in parts:
            assert sum(end - begin for _, begin, end in part["segments"].tolist()) == part["tokens"].numel()


def test_slots_have_documents_of_their_own() -> None:
    numbers = [
        {n for slot in _slots(3, rank=rank, ranks=4, context=2, micro_batches=1) for n, *_ in slot["segments"].tolist()}
        for rank in range(4)
    ]
    assert not (numbers[0] | numbers[1]) & (numbers[2] | numbers[3])


def test_a_rank_that_gets_nothing_of_short_documents_has_padding() -> None:
    options = {"ranks": 2, "context": 2, "longest": 1, "micro_batches": 1, "cut": _over_all, "multiple": 2}
    [first], [second] = (_slots(1, rank=rank, **options) for rank in range(2))
    assert len(_rows(first)) == 16 and _rows(second) == []
    assert second["segments"].tolist() == [[-1, 0, 2]]
    assert second["cu_seqlens"].tolist() == [0, 2] and second["loss_mask"].tolist() == [[0.0, 0.0]]


def test_documents_longer_than_the_rows_of_a_rank_need_several_ranks() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"MAX_DOCUMENT\) is 513, must be at most --tokens-per-rank 256 \* --cp"
    ):
        parse([], {"MAX_DOCUMENT": "513", "TOKENS_PER_RANK": "256", "CP_SIZE": "2"}).resolved(cuda=False, world_size=2)
    with pytest.raises(InvalidArgumentError, match=r"CP_SIZE\) is 2, must divide the 3 data ranks"):
        parse([], {"CP_SIZE": "2"}).resolved(cuda=False, world_size=3)
    assert parse([], {"CP_SIZE": "2"}).resolved(cuda=False, world_size=4).max_document == 1024
    chosen = {"CP_SIZE": "4", "TOKENS_PER_RANK": "101"}
    lengths = [9, 40, 3, 5, *[10] * 6]
    for more, expected in (
        ({}, None),
        ({"HOMES": "head-tail"}, distca.Layout.spread(lengths, ranks=4)),
        # Megatron's own context parallelism cuts all documents over all ranks.
        ({"ATTENTION": "megatron", "HOMES": "head-tail"}, _over_all(lengths, 4)),
    ):
        options = parse([], chosen | more).resolved(cuda=False, world_size=4)
        found = None if options.cut is None else options.cut(lengths, 4)
        assert repr(found) == repr(expected)
        assert expected is None or [found.segments(r) for r in range(4)] == [expected.segments(r) for r in range(4)]
    with pytest.raises(InvalidArgumentError, match=r"HOMES\) is head-tail, needs ranks that share documents"):
        parse([], {"HOMES": "head-tail"}).resolved(cuda=False, world_size=2)


def test_a_token_that_the_model_does_not_know_is_an_error() -> None:
    with pytest.raises(Exception, match=r"the data have token 2\d\d, and the model knows 200"):
        _slots(40, vocabulary=200)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_a_megatron_data_set_has_the_documents_that_were_written(tmp_path: Path, dtype: str) -> None:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=getattr(np, dtype))
    documents = [[[1, 2, 3]], [[4, 5], [6]], [[60000 % 32000]]]
    for sentences in documents:
        builder.add_document(torch.tensor(sum(sentences, [])), [len(sentence) for sentence in sentences])
    builder.finalize(str(tmp_path / "set.idx"))
    options = Options(data=tmp_path / "set").resolved(cuda=False, world_size=1)
    corpus, held_out, vocabulary = read_documents(options)
    assert [corpus.document(n).long().tolist() for n in range(len(corpus))] == [[1, 2, 3], [4, 5, 6], [28000]]
    assert held_out is None and vocabulary == 0
    (tmp_path / "set.bin").write_bytes(b"\0" * 6)
    with pytest.raises(
        Exception, match="set, whose .bin and .idx cannot be read: its two files do not belong together"
    ):
        read_documents(options)


def test_an_argument_counts_more_than_a_variable_and_an_empty_variable_counts_for_nothing() -> None:
    options = parse(["--steps", "7"], {"STEPS": "8", "TP_SIZE": "2", "DATA": "", "SEQUENCE_PARALLEL": "1"})
    assert (options.steps, options.tp_size, options.data, options.sequence_parallel) == (7, 2, None, True)


MISTAKES = {
    "STEPS=x": "STEPS is 'x': must be a whole number",
    "STEPS=0": r"--steps \(STEPS\) is 0, must be at least 1",
    "LR=nan": "LR is 'nan': must be a number",
    "LR=0": r"--lr \(LR\) is 0.0, must be above 0",
    "DOC_SCALE=0": r"--doc-scale \(DOC_SCALE\) is 0.0, must be above 0 and at most 1",
    "DOC_SCALE=1.5": "must be above 0 and at most 1",
    "ATTENTION=flash": "ATTENTION is 'flash': must be one of distca, megatron",
    "HOMES=spread": "HOMES is 'spread': must be one of packed, head-tail",
    "RECOMPUTE=all": "must be one of none, selective, full",
    "SEQUENCE_PARALLEL=yes": "must be 0 or 1",
    "TP_SIZE=3": r"--tp-size \(TP_SIZE\) is 3, times --pp-size 1 must divide the 4 ranks",
    "TP_SIZE=0": "must be at least 1",
    "VPP_SIZE=2": "needs stages: --pp-size is 1",
    "PP_SIZE=2 VPP_SIZE=2 MICRO_BATCHES=3": "must be a multiple of --pp-size 2",
    "MAX_DOCUMENT=513": "must be at most --tokens-per-rank 512",
    "TP_SIZE=2 SEQUENCE_PARALLEL=1 TOKENS_PER_RANK=33": "must be a multiple of --tp-size 2",
    "SEQUENCE_PARALLEL=1": "needs tensor ranks",
    "ATTENTION=megatron PING_PONG=1": r"--ping-pong \(PING_PONG\) is 1, needs --attention distca: it is megatron",
    "EVAL_EVERY=3": "needs --eval-fraction",
    "EVAL_FRACTION=1": "must be at least 0 and below 1",
    "WARMUP_STEPS=100": "must be at least 0 and below --steps 100",
    "PP_SIZE=4 LAYERS=6": "times --vpp-size 1 must divide the 6 layers of tiny",
    "MODEL=llama-9b": "must be one of tiny, llama-8b, llama-34b, qwen3-8b, or a config.json",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_told_in_one_line(given: str) -> None:
    variables = dict(one.split("=") for one in given.split())
    with pytest.raises(InvalidArgumentError, match=MISTAKES[given]) as error:
        shape_of(parse([], variables).resolved(cuda=False, world_size=4))
    assert "\n" not in str(error.value)


def test_a_damaged_line_of_the_log_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for damaged in ('{"step": 2, "lo', "[1]", '{"loss": 1}', "\udcff"):
        log.write_bytes(b'{"step": 1}\n' + damaged.encode(errors="surrogateescape") + b'\n{"step": 3}\n')
        with pytest.raises(
            InvalidArgumentError, match=f"^line 2 of {re.escape(str(log))} is damaged: delete it, or na"
        ):
            RunLog(tmp_path, steps=4, start=3, peak=None).__enter__()
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    with RunLog(tmp_path, steps=4, start=2, peak=None):
        pass
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'  # without what a kill has cut off


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(
        InvalidArgumentError, match="log.jsonl cannot be read: Is a directory; move it away, or name an"
    ):
        RunLog(tmp_path, steps=4, start=0, peak=None).__enter__()


def test_no_lengths_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text("[]")
    options = parse([], {"LENGTHS": str(tmp_path / "lengths.json")}).resolved(cuda=False, world_size=1)
    with pytest.raises(InvalidArgumentError, match=r"--lengths \(LENGTHS\) names an empty list"):
        read_documents(options)


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(cli.time, "strftime", lambda _: "pretrain-now")
    with cli._run_folder(Options()) as first, cli._run_folder(Options()) as second:
        assert [str(first), str(second)] == ["logs/pretrain-now", "logs/pretrain-now-2"]


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    options = Options(run_dir=tmp_path / "run")
    with (
        cli._run_folder(options),
        pytest.raises(InvalidArgumentError, match="another run is under way in .*run: wait until it has ended"),
        cli._run_folder(options),
    ):
        pass
    with cli._run_folder(options):
        pass


def test_a_run_that_is_refused_leaves_no_folder_and_changes_none(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "options.json").write_text("those of the run")
    for name in ("new", "old"):
        with pytest.raises(InvalidArgumentError), cli._run_folder(Options(run_dir=tmp_path / name)):
            raise InvalidArgumentError("a mistake that a rank finds")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "options.json").read_text() == "those of the run"


def test_tensorboard_keeps_the_steps_before_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start in (0, 2):
        with RunLog(tmp_path, steps=4, start=start, peak=None) as log:
            for number in range(start + 1, start + 4):
                log.step(replace(STEP, step=number, loss=float(start)))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]


def test_only_folders_named_as_checkpoints_are_and_those_without_their_state_are_removed(tmp_path: Path) -> None:
    from distca.apps.pretrain import checkpoints

    for name in ("step-9", "step-10", "step-10.bak", "step-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
    for name in ("step-11", "step-11.bak"):
        (tmp_path / name).mkdir()
    checkpoints.remove_unfinished(tmp_path)
    assert [path.name for path in checkpoints.whole_checkpoints(tmp_path)] == ["step-9", "step-10"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-10", "step-10.bak", "step-11.bak", "step-9", "step-x"]


STEP = Step(step=1, loss=2.0, grad_norm=1.0, lr=1e-3, tokens=8, seconds=0.1, flops=1.0)


def _taken(run_dir: Path, monkeypatch: pytest.MonkeyPatch, figures: list[Step], *, stopped_at: int = 0) -> list[str]:
    """What a run of three steps with these figures does, that evaluates and saves after every step."""
    from distca.apps.pretrain import run as module

    given = parse([], {"STEPS": "3", "SAVE_EVERY": "1", "EVAL_FRACTION": "0.5", "EVAL_EVERY": "1"})
    run, done = module.Run.__new__(module.Run), list[str]()

    def step(number: int, stop: StopRequest) -> tuple[Step, bool]:
        stop.requested = number == stopped_at  # by a signal during the step
        return figures[number - 1], bool(stop)

    evaluates = {"_evaluate": lambda: done.append("evaluated") or 1.0, "_held_out": CORPUS}
    about = {"_options": given.resolved(cuda=False, world_size=1), "_run_dir": run_dir, "_start": 0, "_cuda": False}
    parts = {"_corpus": CORPUS, "_memory": MemoryLog(None, None), "_chunks": [], "_optimizer": None, "_fixed": dict}
    vars(run).update(about | evaluates | parts, step=step)
    monkeypatch.setattr(
        module.checkpoints, "save", lambda _, state, *args, **options: done.append(f"saved {state.step}")
    )
    with one_rank():
        try:
            done.append(f"stopped {run.all_steps(StopRequest())}")
        except distca.DistcaError as error:
            done.append(str(error))
    return done


@pytest.mark.parametrize(
    ("bad", "what"), [({"loss": math.nan}, "the loss is nan"), ({"grad_norm": math.inf}, "the gradient norm is inf")]
)
def test_a_figure_that_is_not_finite_ends_the_run_before_it_is_saved(
    bad: dict[str, float], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _taken(tmp_path, monkeypatch, [STEP, replace(STEP, step=2, **bad)])
    assert done == ["saved 1", "evaluated", f"{what} at step 2: lower --lr (LR, now 0.003)"]
    assert json.loads((tmp_path / "options.json").read_text())["steps"] == 3
    assert len(log_of(tmp_path)) == 2


@pytest.mark.parametrize(
    ("stopped_at", "expected"),
    [
        (2, ["saved 1", "evaluated", "saved 2", "stopped True"]),
        (3, ["saved 1", "evaluated", "saved 2", "evaluated", "saved 3", "evaluated", "stopped False"]),
    ],
)
def test_a_run_that_is_stopped_saves_and_does_not_evaluate_unless_it_is_over(
    stopped_at: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _taken(tmp_path, monkeypatch, [STEP] * 3, stopped_at=stopped_at) == expected


@pytest.mark.parametrize(
    ("name", "change"), [("DISTRIBUTED_OPTIMIZER", "set DISTRIBUTED_OPTIMIZER=1"), ("A B", "make")]
)
def test_a_run_that_goes_on_with_another_optimizer_is_told_what_to_set(tmp_path: Path, name: str, change: str) -> None:
    from distca.apps.pretrain import checkpoints

    (tmp_path / "run.json").write_text(json.dumps({"step": 1, "documents": 7, "fixed": {name: True}}))
    message = f"{name} is 0, and the run that is resumed has 1: {change}.*, or name another --run-dir"
    with pytest.raises(InvalidArgumentError, match=message):
        checkpoints.load(tmp_path, [], None, documents=7, fixed={name: False})


def test_a_checkpoint_that_cannot_be_read_or_written_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's error has the traces of all ranks, and is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    from distca.apps.pretrain import checkpoints

    def fail(*_: Any) -> None:
        raise CheckpointException("load", {rank: (OSError(f"no shard\nof rank {rank}"), None) for rank in (1, 0)})

    for name in ("load", "save"):
        monkeypatch.setattr(checkpoints.dist_checkpointing, name, fail)
    monkeypatch.setattr(checkpoints, "sharded_state", lambda *_, **__: {})
    (tmp_path / "run.json").write_text(json.dumps({"step": 1, "documents": 7, "fixed": {}}))
    with pytest.raises(distca.DistcaError, match=f"^the checkpoint {tmp_path} cannot be read: no shard of rank 0$"):
        checkpoints.load(tmp_path, [], mock.Mock(), documents=7, fixed={})
    state = checkpoints.State(2, 7, {})
    with one_rank(), pytest.raises(distca.DistcaError, match="^could not write the checkpoint .*: no shard of rank 0$"):
        checkpoints.save(tmp_path, state, [], None, keep=1)
    state = checkpoints.State(2, 7, {"no JSON": object()})
    monkeypatch.setattr(checkpoints.dist_checkpointing, "save", lambda *_: None)
    with (
        one_rank(),
        pytest.raises(distca.DistcaError, match="^could not write a checkpoint: .* not JSON serializable$"),
    ):
        checkpoints.save(tmp_path, state, [], None, keep=1)


@pytest.mark.usefixtures("all_runs")
def test_what_a_resumed_run_must_have_too_is_in_the_checkpoint(folder: Path) -> None:
    fixed = json.loads((folder / "resumed 0" / "step-3" / "run.json").read_text())["fixed"]
    assert fixed["DISTRIBUTED_OPTIMIZER"] is False and fixed["TOKENS_PER_RANK"] == 128 and "PING_PONG" not in fixed


def test_a_mistake_that_a_launched_rank_finds_has_the_exit_code_of_a_mistake() -> None:
    for mistake, code in ((True, 2), (False, 1)):
        assert exit_code(RankError(1, "rank 1 of 2 failed", expected=True, mistake=mistake)) == code
    assert exit_code(InvalidArgumentError("no")) == 2


def test_heads_that_tensor_ranks_cannot_share_are_an_error() -> None:
    options = parse([], {"TP_SIZE": "16", "MODEL": "llama-8b"}).resolved(cuda=False, world_size=16)
    with pytest.raises(InvalidArgumentError, match="is 16, must divide the 8 key/value heads of llama-8b"):
        shape_of(options)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_a_configuration_of_llama_3_has_its_factor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"rope_scaling": LLAMA3}))
    assert shape_of(Options(model=str(tmp_path)).resolved(cuda=False, world_size=1)).rope_scaling == 8.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"hidden_size": "many"}, "invalid literal"),
        ({"num_hidden_layers": None}, "cannot be read"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor is 2.0, must be 1, which is Megatron's"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor is 8.0, must be 4, which is Megatr"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 2048}},
            "original_max_position_embeddings is 2048, must be 8192, which is Megatron's",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
        ({"use_sliding_window": True}, "use_sliding_window is True, must be false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; silu"),
    ],
)
def test_a_configuration_that_is_not_carried_over_is_an_error(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | change))
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        shape_of(Options(model=str(tmp_path)).resolved(cuda=False, world_size=1))


def test_floating_point_operations_are_those_of_every_matrix_product() -> None:
    shape, lengths = SHAPES["tiny"], [3, 5]
    layer = 128 * (8 * 16) * 2 + 128 * (4 * 16) * 2 + 3 * 128 * 256  # queries and output, keys and values, MLP
    pairs = sum(row + 1 for length in lengths for row in range(length))
    attention = 4 * 8 * (2 * 16 * pairs * 2)  # layers, heads, scores and values
    expected = 3 * (2 * 8 * (4 * layer + 128 * 256) + attention)  # forward, and twice in backward
    positions = torch.tensor([[row for length in lengths for row in range(length)]])
    assert shape.flops(positions, 256) == expected
    assert shape.flops(positions[:, :4], 256) + shape.flops(positions[:, 4:], 256) == expected
