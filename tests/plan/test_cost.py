"""Cost models: rates that depend on the size of tasks, made from measured points, from files or by name."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.apps.cli import main
from distca.apps.profile.attention import KV_ROWS, Q_ROWS

RATES = ((4096, 3000, 2048), (2048, 1500, 1024), (1024, 1024, 1100))


def _cost(model: distca.CostModel, begin: int, end: int, length: int = 2**20) -> int:
    return model.core.cost(0, 0, length, begin, end)


def _between(low: int, high: int, part: Fraction) -> float:
    return float(low + (high - low) * part)


def _rate(num_rows: int, num_keys: int) -> float:
    """The rate of a task: on straight lines between powers of two, and constant beyond the table."""

    def position(n: int) -> tuple[int, int, Fraction]:
        octave = n.bit_length() - 1
        if octave >= 2:
            return 2, 2, Fraction(0)
        return octave, octave + 1, Fraction(n, 2**octave) - 1

    i, next_i, part_i = position(num_rows)
    j, next_j, part_j = position(num_keys)
    low, high = (_between(RATES[line][j], RATES[line][next_j], part_j) for line in (i, next_i))
    return low + (high - low) * float(part_i)


@given(st.integers(0, 20), st.integers(1, 20))
def test_a_pair_costs_what_the_table_says_for_the_size_of_its_task(begin: int, rows: int) -> None:
    model = distca.CostModel(per_pair=1000, per_row=7, rates=RATES)
    pairs = sum(range(begin + 1, begin + rows + 1))
    expected = 1000 * pairs * _rate(rows, begin + rows) / 1024 + 7 * rows
    assert _cost(model, begin, begin + rows) == pytest.approx(expected, rel=2e-3)


def test_without_rates_pairs_and_rows_are_counted_exactly() -> None:
    assert _cost(distca.CostModel(3, 5), 10, 14) == 3 * (11 + 12 + 13 + 14) + 5 * 4


def test_measured_points_come_back_as_costs_in_their_proportions() -> None:
    """A pair takes the device the same time in all tasks of 16 rows and more, and 16 times as long in a single row."""
    points = {(q, kv): 100.0 * max(1, 16 / q) * (q * kv - q * (q - 1) / 2) for q in (1, 16, 64) for kv in (64, 256)}
    model = distca.CostModel.from_points(points, q_heads=2)
    for q, kv in points:
        cost, unit = _cost(model, kv - q, kv), _cost(model, 192, 256)
        assert cost / unit == pytest.approx(points[q, kv] / points[64, 256], rel=0.01)
    assert model.unit_ns is not None
    assert 2 * _cost(model, 192, 256) * model.unit_ns == pytest.approx(points[64, 256], rel=0.01)


def test_noise_never_makes_more_rows_dearer_by_the_row() -> None:
    noisy = {(1, 64): 64.0, (2, 64): 400.0, (4, 64): 250.0}
    model = distca.CostModel.from_points(noisy, q_heads=1)
    rates = [line[6] for line in model.rates]
    assert rates == sorted(rates, reverse=True)


def test_tables_that_come_along_are_found_by_name() -> None:
    assert distca.CostModel.load("pairs") == distca.CostModel()
    h200 = distca.CostModel.load("h200")
    assert _cost(h200, 8191, 8192) == pytest.approx(_cost(h200, 8064, 8192), rel=0.02), "a tile has 128 rows"
    assert distca.CostModel.load("h200", phases=["forward"]) != h200


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({}, "no points"),
        ({(3, 64): 1.0}, "3 rows and 64 keys"),
        ({(64, 32): 1.0}, "64 rows and 32 keys"),
        ({(1, 64): float("nan")}, "nan ns"),
        ({(1, 64): 0.0}, "0.0 ns"),
        ({(0, 64): 1.0}, "0 rows"),
    ],
    ids=str,
)
def test_points_that_cannot_be_are_refused(points: dict[tuple[int, int], float], said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.CostModel.from_points(points, q_heads=1)


@pytest.mark.parametrize(
    ("rates", "said"),
    [(((1, 2), (1,)), "lines of"), (((0,),), "a rate is 0"), (((2**21,),), "a rate is 2097152")],
    ids=str,
)
def test_rates_out_of_range_are_refused(rates: tuple[tuple[int, ...], ...], said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.plan(distca.Layout.from_documents([[8]]), distca.Heads(1, 1, 8), cost=distca.CostModel(rates=rates))


def test_a_profile_of_this_machine_is_a_cost_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distca.apps.profile.attention.Q_ROWS", Q_ROWS[:3])
    monkeypatch.setattr("distca.apps.profile.attention.KV_ROWS", KV_ROWS[:2])
    monkeypatch.setattr("distca.apps.profile.attention._KEYS_PER_CALL", 64)
    path = tmp_path / "cpu.json"
    assert main(["profile", "--rounds", "1", "--q-heads", "2", "--kv-heads", "1", "--out", str(path)]) == 0
    assert "6 task sizes measured" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["kind"] == "measured" and content["device"].startswith("cpu-")
    assert all(point["forward_ns"] > 0 and point["backward_ns"] > 0 for point in content["points"])
    model = distca.CostModel.load(path)
    assert len(model.rates) == 5 and len(model.rates[0]) == 7


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "neither a file nor one of pairs, "),
        ("{", "was not written by"),
        ('{"points": [{}]}', "was not written by"),
    ],
    ids=str,
)
def test_a_file_that_is_no_profile_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.CostModel.load(path)


def test_a_binary_file_is_refused_without_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(b"\xff\xfe" * 5000)
    with pytest.raises(distca.InvalidArgumentError, match="was not written by `distca profile`: ") as caught:
        distca.CostModel.load(path)
    assert len(str(caught.value)) < 300 + len(str(path))
