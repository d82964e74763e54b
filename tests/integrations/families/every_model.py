"""Every causal language model of the installed transformers with attn_implementation="distca": `make families`.

Run as a program it prints the table of verdicts instead.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # needed when this is run as a program
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch

from families import padded, tiny
from families.cases import CASES, expected_kind, is_as_expected, with_rope
from families.reference import documents, mistakes, run
from families.shared_rows import found
from families.verdict import judge
from support.thinning import thinned

WITH_ROPE = {kind: with_rope(kind) for kind in ("dynamic", "longrope")}


@pytest.mark.filterwarnings("ignore")  # transformers warns of kernels
@pytest.mark.parametrize("name", CASES)
def test_a_model_cut_between_two_ranks_is_exact_or_refused_with_the_reason(name: str) -> None:
    verdict = judge(CASES[name])
    assert is_as_expected(name, verdict), verdict


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_model_takes_documents_that_share_rows_if_it_is_exact_where_documents_are_cut(name: str) -> None:
    verdict = found(CASES[name])
    if expected_kind(name) == "exact" and not CASES[name].sees_both_sides:
        assert verdict == "exact"
    else:
        assert verdict.startswith("refused: "), verdict


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share_prompts", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("name", thinned(name for name in CASES if "jitter" not in name))  # its routers draw
def test_a_model_takes_padded_batches_if_it_is_exact(name: str, share_prompts: bool) -> None:
    verdict = padded.found(CASES[name], share_prompts)
    assert verdict == "exact" if padded.is_exact(name, share_prompts) else not verdict.startswith("fails"), verdict


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in WITH_ROPE.items() for name in cases])
def test_a_model_whose_frequencies_depend_on_the_longest_position_is_exact(kind: str, name: str) -> None:
    verdict = judge(WITH_ROPE[kind][name])
    assert is_as_expected(name, verdict), verdict


@pytest.mark.parametrize("name", thinned(name for name in CASES if expected_kind(name) != "refused"))
def test_mistakes_would_change_an_exact_models_logits_a_thousand_times_more_than_is_allowed(name: str) -> None:
    assert min((changes := mistakes(CASES[name])).values()) > 1e-2, changes


@pytest.mark.parametrize("entry", [entry for entry in tiny.NOT_BUILT if entry in tiny.CLASSES])
def test_what_transformers_cannot_make_here_is_known(entry: str) -> None:
    with pytest.raises((ImportError, ValueError), match=tiny.NOT_BUILT[entry][1]):
        run(tiny.model_of(entry, "eager", {}), documents()[0].tokens)


def _print_table() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counts = dict.fromkeys(("exact", "refused", "fails"), 0)
    for name, case in CASES.items():
        verdict = judge(case)
        counts[verdict.kind] += 1
        print(f"{name:40} {verdict.kind:8} {verdict.sentence}", flush=True)
    for entry, (reason, _) in tiny.NOT_BUILT.items():
        print(f"{entry:40} not made: {reason}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"and {len(tiny.NOT_BUILT)} not made")


if __name__ == "__main__":
    _print_table()
