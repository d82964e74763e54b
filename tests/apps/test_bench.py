"""The parts of the benchmarks: peers compute what they should, and reports hold what was measured."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

import distca
from distca import testing
from distca.apps.bench import gpu, gpu_transport, padded, pipeline, rounds, transport
from distca.apps.bench.harness import Result, Row, write_report
from distca.apps.bench.peers import AllGather, AllToAll
from distca.apps.bench.ranks import bytes_sent, on_threads
from distca.apps.cli import main
from distca.apps.common.timing import median_ratio, seconds, spread
from support.batches import random_batch
from support.oracle import oracle
from support.ranks import launch

LENGTHS = (64, 8, 128)
HEADS = distca.Heads(4, 2, 16)


def _peers_on_a_rank() -> list[list[torch.Tensor]]:
    """This rank's out, dq, dk and dv, with the rows in the order of each peer."""
    batch = random_batch(LENGTHS, HEADS, 3)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for peer in (AllGather(LENGTHS), AllToAll(LENGTHS)):
        rows = _rows_of(type(peer), rank, ranks)
        q, k, v = (t[rows].requires_grad_() for t in (batch.q, batch.k, batch.v))
        out = peer(q, k, v)
        out.backward(batch.dout[rows])
        assert q.grad is not None and k.grad is not None and v.grad is not None
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return results


def _rows_of(peer: type, rank: int, ranks: int) -> torch.Tensor:
    if peer is AllToAll:
        part = sum(LENGTHS) // ranks
        return torch.arange(rank * part, (rank + 1) * part)
    rows, begin = [], 0
    for length in LENGTHS:
        chunk = length // (2 * ranks)
        for index in (rank, 2 * ranks - 1 - rank):
            rows.append(torch.arange(begin + index * chunk, begin + (index + 1) * chunk))
        begin += length
    return torch.cat(rows)


def test_the_peers_that_are_timed_compute_the_same_attention() -> None:
    of_ranks = launch(_peers_on_a_rank, ranks=2)
    out, _, *gradients = oracle(random_batch(LENGTHS, HEADS, 3))
    for index, peer in enumerate((AllGather, AllToAll)):
        for rank in range(2):
            rows = _rows_of(peer, rank, 2)
            for ours, expected in zip(of_ranks[rank][index], (out, *gradients), strict=True):
                torch.testing.assert_close(ours.double(), expected[rows], rtol=1e-4, atol=1e-5)


def test_a_report_has_every_figure_with_its_bound_and_the_setting(tmp_path: Path) -> None:
    results = [
        Result("first", [Row("ratio", 0.5, "x", at_most=0.75), Row("rate", 12.25, "GFLOP/s", at_least=10)], {"n": 3}),
        Result("second", [Row("time", 7, "ms")]),
    ]
    written = write_report(results, tmp_path).read_text()
    assert "| ratio | 0.5 x | at most 0.75 |" in written
    assert "| rate | 12.25 GFLOP/s | at least 10 |" in written
    assert "| time | 7 ms |  |" in written
    assert f"- torch: {torch.__version__}" in written
    assert json.loads((tmp_path / "first.json").read_text())["rows"][1]["at_least"] == 10


def test_medians_of_ratios_and_spreads() -> None:
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == 3.0
    assert spread([1.0, 2.0, 3.0]) == 1.0
    assert spread([1.0]) == 0.0


def test_a_transport_is_as_fast_and_steals_as_much_as_the_times_say() -> None:
    memcpy = [0.001, 0.002, 0.003]
    measured = {1 << 20: {"shm": (memcpy, [0.002, 0.004, 0.006]), "torch": (memcpy, [0.01, 0.02, 0.03])}}
    rows = {row.name: row for row in transport.bandwidth_rows(measured)}
    assert rows["1024 KiB: memcpy, median"].value == pytest.approx((1 << 20) / 0.002 / 1e9)
    assert rows["1024 KiB: bandwidth of shm / memcpy"].value == pytest.approx(0.5)
    assert rows["1024 KiB: bandwidth of shm / memcpy"].at_least == 0.8
    assert rows["1024 KiB: bandwidth of torch / memcpy"].value == pytest.approx(0.1)
    assert rows["1024 KiB: bandwidth of torch / memcpy"].at_least is None
    alone, sending, both = [0.02, 0.02], [0.01, 0.01], [0.025, 0.025]
    beside = transport.beside_rows({1: {"torch": (alone, sending, both)}}, 2)
    assert [row.value for row in beside] == pytest.approx([1.25, 0.5])
    assert all(row.name.startswith("matmul on 1 of 2 cores beside 16 MiB by torch") for row in beside)


def test_the_transports_benchmark_measures_each_at_every_size_and_beside_a_matmul(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "SHORT_SIZES", (1 << 14,))
    result = transport.run(2, short=True)
    names = [row.name for row in result.rows]
    for over in ("shm", "shm with thread", "torch"):
        assert f"16 KiB: bandwidth of {over} / memcpy" in names
        assert [name for name in names if f"by {over}: time stolen" in name]
    assert all(row.value > 0 for row in result.rows if "stolen" not in row.name)


def test_the_pipelines_benchmark_compares_balance_over_all_stages_with_less() -> None:
    all_rows = pipeline.run(short=True).rows
    rows = {row.name.split(": ")[-1]: row for row in all_rows}
    over_all, inside, none = (
        rows[name].value for name in ("largest loads over the ideal", "balanced inside each stage", "not balanced")
    )
    assert 1 <= over_all <= 1.02 < inside < none
    assert rows["largest loads over the ideal"].at_most == 1.02
    assert rows["time over as many single plans"].at_most == 1.2
    assert rows["largest arena, loads up to 1.05"].value < rows["largest arena"].value
    assert 1 <= rows["the same over the mean of the ranks"].value < 1.1
    ticks = [row.value for row in all_rows if "ticks, each of a whole stage" in row.name]
    assert ticks == [38, 53, 80, 35, 33.5]
    held = [row.value for row in all_rows if "in flight on the first stage" in row.name]
    assert held == [7, 4, 2, 5.5, 4.75]


def test_the_benchmark_of_rounds_has_rows_in_several_and_times_of_both() -> None:
    result = rounds.run(1, short=True)
    (row,) = result.rows
    assert row.name == "traffic 0.6 of a step without a link: step in rounds / rows at once" and row.value > 0
    assert result.details["rounds_of_rows"] == 3
    assert [len(result.details["seconds"][0.6][name]) for name in ("at_once", "in_rounds")] == [1, 1]


def test_the_benchmark_of_padded_batches_counts_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its steps: what it says of batches is what they are."""
    seconds = {"padded": [4.0, 8.0, 6.0], "unpad": [2.0, 2.0, 3.0], "unpad, share_prompts": [1.0, 1.0, 1.0]}
    monkeypatch.setattr(distca, "launch", lambda *args, **options: [seconds] * 2)
    rows = {row.name: row.value for row in padded.run(1, short=True).rows}
    assert rows["time: unpad / padded"] == 0.5 and rows["time: unpad, share_prompts / padded"] == 1 / 6
    batches = [padded.batch_of(0, rank) for rank in range(2)]
    everything = sum(batch["input_ids"].numel() for batch in batches)
    kept = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert rows["rows: no padding / all"] == kept / everything
    alike = 0
    for rank, batch in enumerate(batches):
        for (prompt, _), one, other in zip(padded.lengths_of(0, rank), *batch["input_ids"].chunk(2), strict=True):
            assert torch.equal(one[:prompt], other[:prompt]) and one[prompt] != other[prompt]
            alike += prompt
    assert rows["rows: no padding, prompts once / all"] == (kept - alike) / everything


@pytest.mark.parametrize("benchmark", ["attention", "shards", "transport", "all"])
def test_without_a_gpu_its_benchmarks_say_so(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["bench", benchmark, "--device", "cuda"]) == 1
    assert "--device cuda, but PyTorch finds no CUDA device here" in capsys.readouterr().err


def test_a_benchmark_that_has_no_gpu_form_says_which_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--device", "cuda"]) == 2
    assert "--device cuda runs attention, shards, transport or all" in capsys.readouterr().err


def test_the_gpu_benchmarks_time_every_peer_that_is_there_and_name_those_that_are_not() -> None:
    # The benchmark runs on the CPU here, timed by the wall clock; it times the same calls as on a GPU.
    case = gpu.Case("tiny", (40, 24), 16)
    result = gpu.attention_of([case], 2, seconds, "cpu")
    names = [row.name for row in result.rows]
    assert "tiny, forward: rate" in names and "tiny, backward: SDPA flash's time / ours" in names
    assert all(row.value > 0 for row in result.rows)
    missing = result.details["missing"]
    assert any(name.startswith("SDPA cuDNN") for name in missing) and any("varlen" in name for name in missing)
    assert set(result.details["tiny, forward"]) == {"distca", "SDPA flash"}
    cut = gpu.shards_of(64, (16, 32), 2, seconds, "cpu")
    assert [row.name for row in cut.rows if "forward" in row.name] == [
        f"tasks of {n} rows, forward: rate / rate of the whole document" for n in (16, 32)
    ]


def test_the_gpu_benchmarks_peers_compute_the_same_attention() -> None:
    lengths, inputs = (40, 24), gpu._inputs((40, 24), 16, "cpu")
    ours = gpu._ours(inputs, lengths)()
    torch.testing.assert_close(gpu.PEERS["SDPA flash"](inputs, lengths)(), ours, rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="flash attention takes these heads"):
        gpu.PEERS["SDPA efficient"](inputs, lengths)
    wide = gpu._inputs(lengths, 264, "cpu")
    found = gpu._sdpa_of_wide_heads(SDPBackend.MATH, wide, lengths)()
    torch.testing.assert_close(found, gpu._ours(wide, lengths)(), rtol=0.02, atol=0.02)


def test_the_gpu_benchmark_of_transports_measures_those_that_are_there_and_names_those_that_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This runs on the CPU: loopback ranks, with streams and without. Work that is done three times replaces the matmul.
    monkeypatch.setattr(gpu_transport, "BESIDE_BYTES", 1 << 20)

    def beside(work: Callable[[], object]) -> float:
        return seconds(lambda: [work() for _ in range(3)])

    with ExitStack() as stack:
        pairs, missing = gpu_transport.connect(["loopback", "nvshmem"], "cpu", 1 << 21, stack)
        options = {"max_tokens": 1, "heads": HEADS, "heap_bytes": 1 << 21}
        streams = [stack.enter_context(rank) for rank in testing.loopback(2, streams=True, **options)]
        pairs["streams"] = gpu_transport.Pair(*streams)
        result = gpu_transport.transport_of(pairs, (1 << 14,), 2, beside, "cpu", lambda: None)
    assert list(pairs) == ["loopback", "streams"] and "moves rows between GPUs" in missing["nvshmem"]
    rows = {row.name: row.value for row in result.rows}
    names = ["16 KiB: copy on the device, median"]
    for over in pairs:
        beside_it = f"matmul beside puts of 1 MiB by {over}"
        names += [f"16 KiB: bandwidth of {over} / copy", f"{beside_it}: time / alone", f"{beside_it}: puts in a matmul"]
        assert rows[f"{beside_it}: puts in a matmul"] == 3
    assert rows.keys() == set(names)
    assert all(value > 0 for value in rows.values())


def test_a_gpu_on_which_no_loopback_works_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_transport, "require_gpu", lambda: None)
    monkeypatch.setattr(gpu_transport, "connect", lambda *_: ({}, {"loopback": "loading a kernel: no kernel image"}))
    with pytest.raises(distca.DeviceError, match="no loopback on this GPU: loading a kernel: no kernel image"):
        gpu_transport.transport(short=True)


def test_rows_that_no_heap_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_transport, "BESIDE_BYTES", 1 << 20)
    with ExitStack() as stack:
        pairs, _ = gpu_transport.connect(["loopback"], "cpu", 1 << 13, stack)
        with pytest.raises(distca.InvalidArgumentError, match="leaves the heap"):
            gpu_transport.transport_of(pairs, (1 << 20,), 1, seconds, "cpu", lambda: None)


def test_ranks_on_threads_return_in_their_order_and_the_first_error_is_raised() -> None:
    def work(rank: int, start: threading.Barrier) -> int:
        start.wait()
        return 10 * rank

    def fail(rank: int, start: threading.Barrier) -> None:
        if rank == 1:
            raise ArithmeticError("rank 1")
        start.wait()  # for all ranks, one of which does not come

    assert on_threads(work, 3) == [0, 10, 20]
    with pytest.raises(ArithmeticError, match="rank 1"):
        on_threads(fail, 3)


def test_the_bytes_that_a_link_carries_are_those_of_the_rank_that_sends_most() -> None:
    layout = distca.Layout.from_documents([[96], [8], [8]])
    plan = distca.plan(layout, HEADS, tolerance=0.0, min_rows=8)
    of_ranks = [sum(one.bytes for one in plan.transfers if one.source == rank) for rank in range(3)]
    assert len(set(of_ranks)) > 1
    assert bytes_sent([plan]) == max(of_ranks)
    assert bytes_sent([plan, plan]) == 2 * max(of_ranks)
