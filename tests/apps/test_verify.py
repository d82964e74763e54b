"""`distca verify`: what it computes is right, what is wrong is noticed, and mistakes in its options are refused."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import distca
from distca.apps import cli
from distca.apps.verify import ranks as side_of_a_rank
from distca.apps.verify.cases import Case, Inputs, all_features, all_shapes, between_ranks, random_inputs
from distca.apps.verify.command import _without_nan
from distca.apps.verify.ranks import Returned, Where, results_of_rank
from distca.apps.verify.reference import exact, rounded
from distca.apps.verify.verify import MOST_RMS, NAMES, Reference, _failed, _judged
from distca.caller import is_deterministic
from distca.connect.launch import RankError
from support.batches import Batch
from support.branches import Tree, attention_of_tree, own_rows
from support.oracle import oracle
from support.ranks import launch
from support.score_features import eager_attention

HEADS = distca.Heads(4, 2, 32, dtype=torch.bfloat16)
RANKS = Where("cpu", "own", "shm", 3)
ALONE = replace(RANKS, transport="loopback", ranks=1)


def _batch(case: Case, inputs: Inputs) -> Batch:
    return Batch(case.lengths, case.heads, *inputs[:4])


@pytest.mark.parametrize("case", all_features(HEADS)[:-1], ids=lambda case: case.name)
def test_the_reference_is_what_the_tests_own_oracles_compute(case: Case) -> None:
    inputs = random_inputs(case, 1)
    batch = _batch(case, inputs)
    found = exact(case, inputs)
    if case.branches:
        own = [range(case.first_row(d), case.first_row(d) + n) for d, n in enumerate(case.lengths)]
        branches = {
            d: [(of, own[of].start + begin, own[of].start + end) for of, begin, end in begins]
            for d, begins in case.branches
        }
        tree = Tree([rows.stop for rows in own], own, branches)
        places = own_rows(Batch(tuple(tree.lengths), case.heads, *inputs[:4]), tree)
        wide = [torch.zeros(sum(tree.lengths), *t.shape[1:], dtype=t.dtype) for t in inputs[:4]]
        for one, rows in zip(wide, inputs[:4], strict=True):
            one[places] = rows
        right = attention_of_tree(Batch(tuple(tree.lengths), case.heads, *wide), tree, torch.float64)
    elif case.softcap or case.has_sinks or case.has_dlse:
        features = (case.softcap, inputs.sinks, case.scale, inputs.dlse, case.mask, case.window)
        right = eager_attention(batch, torch.float64, *features)
    else:
        right = oracle(batch, case.scale, case.mask, case.window, dict(case.bidirectional))
    for name, a, b in zip(NAMES, found, right, strict=False):
        assert torch.equal(a, b) or (a - b).abs().max() < 1e-9, name


@pytest.mark.parametrize("case", all_features(replace(HEADS, dtype=torch.float32)), ids=lambda case: case.name)
def test_where_nothing_is_rounded_both_references_are_the_same(case: Case) -> None:
    inputs = random_inputs(case, 2)
    for name, a, b in zip(NAMES, rounded(case, inputs), exact(case, inputs), strict=True):
        if a is not None and b is not None:
            assert (a - b).abs().max() < 3e-5 * max(1, b.abs().max()), name


def test_dtypes_and_dimensions_of_heads_differ_and_names_do_not_repeat() -> None:
    cases = [case for dtype in (torch.bfloat16, torch.float16) for case in all_shapes(dtype)]
    assert {case.heads.dtype for case in cases} == {torch.bfloat16, torch.float16}
    assert {case.heads.dim for case in cases} >= {80, 96, 128, 192, 256, 512}
    for of_heads in (all_features(HEADS), between_ranks(HEADS)):
        assert len({case.name for case in of_heads}) == len(of_heads)


# ---- what is wrong

CASE = replace(between_ranks(HEADS)[4], lengths=(130, 1, 310, 64, 150, 7, 301, 65))


RIGHT = Reference(CASE, 5)


@pytest.fixture(scope="module")
def returned() -> tuple[list[Returned], Returned]:
    """What three ranks and one rank return for CASE."""
    (alone,) = launch(results_of_rank, ALONE, [CASE], 5, 60.0, ranks=1)
    return [one[0] for one in launch(results_of_rank, RANKS, [CASE], 5, 60.0, ranks=3)], alone[0]


def _next_bits(rows: np.ndarray) -> None:
    rows.flat[3] = np.nextafter(rows.flat[3], np.float32(np.inf))


def _padding(ranks: list[Returned]) -> tuple[Returned, int]:
    for rank, one in enumerate(ranks):
        at = 0
        for document, begin, end in CASE.layout(3, 5).segments(rank):
            if document < 0:
                return one, at
            at += end - begin
    raise AssertionError("no rank has padding")


def _swapped_rows(ranks: list[Returned], i: int) -> None:
    for run in ranks[0].runs:
        run[i][[3, 4]] = run[i][[4, 3]]


def _less_of_one_row(ranks: list[Returned], i: int) -> None:
    for run in ranks[1].runs:
        sizes = np.abs(run[i]).reshape(len(run[i]), -1).max(1)
        run[i][np.where(np.isfinite(sizes), sizes, 0).argmax()] *= np.float32(0.93)


def _one_element(ranks: list[Returned], i: int) -> None:
    for run in ranks[0].runs:
        run[i].flat[3] += np.float32(0.1)


def _a_little_off(ranks: list[Returned], i: int) -> None:
    for one in ranks:
        for run in one.runs:
            run[i] *= np.float32(1 + 2**-7)


def _nan(ranks: list[Returned], i: int) -> None:
    rank = next(rank for rank in range(3) if CASE.layout(3, 5).segments(rank)[0][0] >= 0)  # begins without padding
    for run in ranks[rank].runs:
        run[i].flat[1] = np.nan


def _second_run(ranks: list[Returned], i: int) -> None:
    _next_bits(ranks[0].runs[1][i])


def _other_bits(ranks: list[Returned], i: int) -> None:
    for run in ranks[0].runs:
        _next_bits(run[i])


def _padding_that_is_one(ranks: list[Returned], i: int) -> None:
    one, at = _padding(ranks)
    one.runs[0][i][at] = one.runs[1][i][at] = 1


@pytest.mark.parametrize(
    ("alter", "results", "said"),
    [
        (_swapped_rows, range(5), "times the error allowed"),
        (_less_of_one_row, range(5), "times the error allowed"),
        (_one_element, range(5), "times the error allowed"),
        (_a_little_off, range(5), "times the error allowed"),
        (_nan, range(5), "nan times the error allowed"),
        (_second_run, range(6), "the second time other bits"),
        (_other_bits, range(3), "out, lse or dq have not the bits of one rank"),
        (_padding_that_is_one, range(5), "padding rows have not out 0, lse -inf and gradients 0"),
    ],
)
def test_results_that_are_wrong_are_noticed(
    returned: tuple[list[Returned], Returned],
    alter: Callable[[list[Returned], int], None],
    results: range,
    said: str,
) -> None:
    ranks, alone = returned
    right = _judged(RANKS, CASE, ranks, alone, RIGHT, 5)
    assert right.passed and right.wrong == "" and set(right.errors) == {*NAMES, "max_logits"}
    for i in results:
        altered = copy.deepcopy(ranks)
        alter(altered, i)
        found = _judged(RANKS, CASE, altered, alone, RIGHT, 5)
        assert found.passed is False and said in found.wrong, (NAMES[i], found)


def test_the_gradient_of_sinks_has_a_bound_too(returned: tuple[list[Returned], Returned]) -> None:
    ranks, alone = copy.deepcopy(returned)
    for run in ranks[0].runs:
        run[5] *= np.float32(-1)
    assert "dsinks" in _judged(RANKS, CASE, ranks, alone, RIGHT, 5).wrong


def test_the_largest_logits_have_a_bound_and_the_bits_of_one_rank(returned: tuple[list[Returned], Returned]) -> None:
    largest = np.stack([one.max_logits[0] for one in returned[0]])
    rank, head = np.unravel_index(largest.argmax(), largest.shape)
    for change, said in (
        (lambda found: np.nextafter(found, np.float32(9)), "max_logits have not the bits of one rank"),
        (lambda found: found + np.float32(0.1), "max_logits has"),
        (lambda found: -np.float32(np.inf), "max_logits has inf times the error allowed"),
        (lambda found: np.float32(np.nan), "max_logits has nan times the error allowed"),
    ):
        ranks, alone = copy.deepcopy(returned)
        for run in ranks[rank].max_logits:
            run[head] = change(run[head])
        found = _judged(RANKS, CASE, ranks, alone, RIGHT, 5)
        assert found.passed is False and said in found.wrong, found


def test_atens_flash_attention_may_add_in_any_order(returned: tuple[list[Returned], Returned]) -> None:
    ranks, alone = copy.deepcopy(returned)
    _second_run(ranks, 3)
    _other_bits(ranks, 2)
    assert _judged(replace(RANKS, device="cuda", attention="flash"), CASE, ranks, alone, RIGHT, 5).passed


@pytest.mark.parametrize("alter", [_less_of_one_row, _nan, _padding_that_is_one])
def test_a_backward_that_is_not_deterministic_has_to_be_right_too(
    returned: tuple[list[Returned], Returned], alter: Callable[[list[Returned], int], None]
) -> None:
    where = replace(RANKS, device="cuda")
    ranks, alone = copy.deepcopy(returned)
    for one in ranks:
        one.runs.append(copy.deepcopy(one.runs[0]))
    _next_bits(ranks[0].runs[2][2])
    assert _judged(where, CASE, ranks, alone, RIGHT, 5).passed
    altered = copy.deepcopy(ranks)
    alter(altered, 3)
    for rank, one in enumerate(ranks):
        one.runs[2] = altered[rank].runs[0]
    assert not _judged(where, CASE, ranks, alone, RIGHT, 5).passed


def test_what_is_missing_is_not_available_and_what_fails_is_a_fault() -> None:
    for refused, passed in (
        (Returned([], "no such heads"), None),
        (Returned([], "no softcap", is_fault=True), False),
    ):
        check = _judged(ALONE, CASE, [refused], None, RIGHT, 5)
        assert check.passed is passed and check.wrong == refused.refusal
    missing = RankError(0, "rank 0: no peer access", exception="UnavailableError", expected=True)
    illegal = RankError(0, "rank 0: an illegal memory access", exception="DeviceError", expected=True)
    died = RankError(1, "rank 1 was ended by signal 11")
    raised = RankError(1, "rank 1: other plans", exception="PlanMismatchError", expected=True)
    assert [_failed(RANKS, error).passed for error in (missing, illegal, died, raised)] == [None, False, False, False]


def test_what_one_rank_could_not_compute_is_not_compared(returned: tuple[list[Returned], Returned]) -> None:
    """The ranks have returned something, or were refused too, which is no further fault."""
    for ranks in (returned[0], [Returned([], "not these heads", is_fault=True)] * 3):
        check = _judged(RANKS, CASE, ranks, Returned([], "no such heads"), RIGHT, 5)
        assert check.passed is None and check.wrong == "no such heads"


def test_an_error_that_is_nan_is_null_in_json() -> None:
    assert _without_nan({"out": 0.5, "dq": float("nan")}) == {"out": 0.5, "dq": None}


def _refusing(_: bool) -> side_of_a_rank.Computed:
    raise distca.InvalidArgumentError("no softcap")


def test_only_flash_attention_may_refuse_a_case() -> None:
    for attention, is_fault in (("own", True), ("flash", False)):
        where = Where("cuda", attention, "loopback", 1)
        returned = side_of_a_rank._computed(_refusing, (True,), where, 60.0)
        assert (returned.refusal, returned.is_fault) == ("no softcap", is_fault)


def _hangs() -> None:
    side_of_a_rank._GRACE_SECONDS = 0.0
    side_of_a_rank._computed(lambda _: time.sleep(60), (True,), ALONE, 0.5)


def test_a_rank_that_hangs_ends() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as raised:
        launch(_hangs, ranks=1)
    assert time.monotonic() - begin < 30 and _failed(ALONE, raised.value).passed is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_what_is_rounded_no_more_than_it_must_is_within_the_bounds(dtype: torch.dtype) -> None:
    """Also where sums are small and their terms are not."""
    lengths = (130, 1, 310, 64)
    for heads, seed in itertools.product(
        (distca.Heads(4, 2, 64, dtype=dtype), distca.Heads(1, 1, 8, 16, dtype)), range(8)
    ):
        case = Case("sinks", heads, lengths, has_sinks=True, has_dlse=seed % 2 == 0)
        best = [t for t in rounded(case, random_inputs(case, seed)) if t is not None]
        errors = Reference(case, seed).errors(best, MOST_RMS)
        assert len(errors) == 6 and max(errors.values()) <= 0.85, (heads, seed, errors)


def test_the_rows_of_padding_are_nan_in_every_input(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, ...]:
        given.extend(t.detach() for t in (q, k, v))
        out = torch.zeros(len(q), CASE.heads.q, CASE.heads.value_dim, requires_grad=True)
        lse = torch.zeros(len(q), CASE.heads.q, requires_grad=True)
        for t in (out, lse):
            t.register_hook(given.append)
        return out * 1, lse * 1, lse.detach()[0]

    monkeypatch.setattr(side_of_a_rank, "core_attention", attend)
    plan = CASE.plan(3, 5)
    rank = next(rank for rank in range(3) if any(d < 0 for d, _, _ in plan.layout.segments(rank)))
    side_of_a_rank._step(RANKS, CASE, plan, SimpleNamespace(rank=rank, device="cpu"), 5, True)
    is_padding = side_of_a_rank.rows_of_rank(CASE, plan.layout, rank) < 0
    assert len(given) == 5 and is_padding.any()
    for tensor in given:
        assert tensor[is_padding].isnan().all() and not tensor[~is_padding].isnan().any()


def test_the_local_kernel_is_asked_for_all_that_a_case_has(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []

    def attend(q: torch.Tensor, *rows: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        given.append(options | {"sinks": rows[3] is not None, "deterministic": is_deterministic(False)})
        return distca.attention(q, *rows, **options)

    monkeypatch.setattr(side_of_a_rank, "attention", attend)
    case = Case("a window", HEADS, window=9, scale=0.3, softcap=2.0, has_sinks=True, has_dlse=True)
    for mode in (True, False):
        results, largest = side_of_a_rank._local(replace(ALONE, transport=side_of_a_rank.LOCAL), case, 4, mode)
        assert not torch.are_deterministic_algorithms_enabled() and len(results) == 6
    asked = {"mask": "causal", "window": 9, "scale": 0.3, "softcap": 2.0, "attention": None, "sinks": True}
    asked["max_logits"] = True
    assert given == [asked | {"deterministic": True}, asked | {"deterministic": False}]
    returned = Returned([results, results], max_logits=[largest])
    assert _judged(ALONE, case, [returned], None, Reference(case, 4), 4).passed


# ---- the command

SMALL = ["verify", "--device", "cpu", "--q-heads", "3", "--kv-heads", "1", "--head-dim", "16", "--v-head-dim", "24"]


def test_the_command_finds_this_machine_right_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert cli.main([*SMALL, "--dtype", "bf16", "--seed", "3", "--transports", "shm", "--json", str(file)]) == 0
    head, alone, local, ranks, last = capsys.readouterr().out.splitlines()
    assert head.startswith(f"distca {distca.__version__}, torch {torch.__version__}, ")
    assert alone.startswith("ok cpu, bf16: 14 problems, errors up to 0.")
    assert local.startswith("ok cpu, distca.attention, bf16: 9 problems, errors up to 0.")
    assert ranks.startswith("ok cpu, shm, 3 ranks, bf16: 8 problems, errors up to 0.")
    assert last == "31 ok, 0 not available, 0 wrong"
    content = json.loads(file.read_text())
    assert len(content["checks"]) == 31 and content["seed"] == 3 and content["cpu_kernel"] == distca._C.cpu_isa()
    assert all(check["passed"] and 0 < max(check["errors"].values()) < 1 for check in content["checks"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--attention", "own"], "--attention is for --device cuda"),
        (["--transports", "shm,cuda-ipc"], "--transports: 'cuda-ipc'; shm, torch are allowed here"),
        (["--ranks", "1"], "--ranks is 1; 2 to 64 are allowed"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--timeout", "1e9"], "--timeout is 1000000000.0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", str(2**63)], "--seed is 9223372036854775808"),
        (["--head-dim", "0"], "dim = 0"),
        (["--json", "/proc/none/found.json"], "--json /proc/none/found.json cannot be written"),
        (["--timeout", "-1"], "--timeout is -1.0"),
        (["--head-dim", "20"], "dim = 20"),
        (["--kv-heads", "2"], "3 query heads and 2 key/value heads"),
    ],
)
def test_mistakes_in_options_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, *options]) == 2
    assert said in capsys.readouterr().err


def test_dimensions_need_the_number_of_heads_and_a_gpu_has_to_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--head-dim", "64"]) == 2
    assert "need --q-heads" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["verify", "--device", "cuda"]) == 2
        assert "PyTorch finds no GPU here" in capsys.readouterr().err
