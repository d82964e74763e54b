"""An argument chooses what computes attention; without it the environment does, and then what the device is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import distca
from distca.apps.doctor import gpu as doctor_gpu
from distca.connect.options import chosen_attention
from support import flash_on_cpu
from support.batches import random_batch
from support.groups import loopback_group

HEADS = distca.Heads(4, 2, 32, dtype=torch.bfloat16)
LENGTHS = (700, 1, 400)  # so many rows that bf16 rounds some sums differently where they were made differently
WORDS = ("auto", "own", "flash")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTCA_ATTENTION", raising=False)


@pytest.mark.parametrize("argument", [None, *WORDS])
@pytest.mark.parametrize("variable", [None, *WORDS])
def test_an_argument_counts_before_the_environment_and_without_kernels_for_the_gpu_auto_is_flash(
    argument: str | None, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("DISTCA_ATTENTION", variable)
    said = argument or variable or "auto"
    assert chosen_attention(argument, "cuda:99", HEADS) == {"auto": "flash", "own": "own", "flash": "flash"}[said]
    assert chosen_attention(argument, "cpu", HEADS) == ("flash" if argument == "flash" else "own")


def test_another_word_is_refused_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.zeros(3, 4, 2, 16).unbind()

    def refused(said: str, **options: str) -> None:
        with pytest.raises(distca.InvalidArgumentError, match=f'{said}"auto", "own" and "flash" are allowed'):
            distca.init(max_tokens=8, heads=HEADS, **options)
        with pytest.raises(distca.InvalidArgumentError, match=f'{said}"auto", "own" and "flash" are allowed'):
            distca.loopback(2, max_tokens=8, heads=HEADS, **options)
        with pytest.raises(distca.InvalidArgumentError, match=f'{said}"auto", "own" and "flash" are allowed'):
            distca.attention(q, k, v, **options)

    refused('attention = "slow"; ', attention="slow")
    refused('attention = ""; ', attention="")
    monkeypatch.setenv("DISTCA_ATTENTION", "Flash")
    refused('DISTCA_ATTENTION = "Flash"; ')
    assert distca.attention(q, k, v, attention="own")[0].shape == q.shape


def test_local_attention_computes_forward_and_backward_by_what_it_was_asked_for() -> None:
    flash_on_cpu.register()
    batch, ends = random_batch(LENGTHS, HEADS, 1), [0, 700, 701, 1101]
    tasks = torch.tensor([(a, b, a, b) for a, b in zip(ends, ends[1:], strict=False)])

    def computed(operator: object, **options: object) -> tuple[torch.Tensor, ...]:
        q, k, v = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
        out, lse = operator(q, k, v, tasks, **options)  # type: ignore[operator]
        out.backward(batch.dout)
        return tuple(t.detach() for t in (out, lse, v.grad))

    def compare() -> None:
        by_flash, own = computed(torch.ops.distca.attention_by_flash), computed(distca.attention)
        # Else nothing would tell which of them computed forward, and which backward.
        assert not all(map(torch.equal, by_flash[:2], own[:2])) and not torch.equal(by_flash[2], own[2])
        for options, expected in (
            ({"attention": "flash"}, by_flash),
            ({"attention": "own"}, own),
            ({"attention": "auto"}, own),
        ):
            for a, b in zip(computed(distca.attention, **options), expected, strict=True):
                assert torch.equal(a, b), options

    with ThreadPoolExecutor(1) as pool:  # a thread keeps the backend that it computed with before
        pool.submit(compare).result()


def test_the_environment_says_nothing_about_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_ATTENTION", "flash")
    plan = distca.plan(distca.Layout.from_documents([[5], [4]]), HEADS)
    with loopback_group(plan) as contexts:
        assert contexts[0].attention.startswith("CPU kernel, ")


@pytest.mark.parametrize(
    ("variable", "has_own", "fine", "said"),
    [
        (None, False, True, "flash attention (FA3) (the default)"),
        ("auto", False, True, "flash attention (FA3) (DISTCA_ATTENTION=auto)"),
        ("flash", True, True, "by PyTorch's flash attention (FA3) (DISTCA_ATTENTION=flash)"),
        ("own", True, True, "by distca's own kernels (DISTCA_ATTENTION=own)"),
        ("own", False, False, "by distca's own kernels (DISTCA_ATTENTION=own)"),
        ("fast", True, False, "DISTCA_ATTENTION=fast"),
    ],
)
def test_doctor_says_what_computes_on_a_gpu_and_why(variable: str | None, has_own: bool, fine: bool, said: str) -> None:
    finding = doctor_gpu.attention(variable, has_own, " (FA3)")
    assert said in finding.found and finding.fine == fine
    assert bool(finding.advice) == (not fine)
