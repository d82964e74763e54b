"""Ranks whose models differ in layers or in what they evaluate are told the step, the layer and what to change."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import distca
import distca.integrations.hf
from support.groups import ADVICE, loopback_group, outcomes

HEADS = distca.Heads(q=4, kv=2, dim=8)
LAYOUTS = [distca.Layout.packed(lengths, ranks=2, tokens_per_rank=48) for lengths in ([80, 16], [9, 70, 17])]
Work = Callable[[int, distca.Context], object]


def _model(layers: int = 2, attention: str = "distca") -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=HEADS.q,
        num_key_value_heads=HEADS.kv,
        pad_token_id=None,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).train()


def _batch(step: int, rank: int) -> dict[str, object]:
    """A rank's keywords for forward, with the plan; every step has other documents."""
    plan = distca.plan(LAYOUTS[step % 2], HEADS, tolerance=0.0, min_rows=1, rank=rank)
    ids = torch.randint(2, 61, (1, 48), generator=torch.Generator().manual_seed(2 * step + rank))
    return {"input_ids": ids, "position_ids": plan.layout.position_ids(rank)[None], "use_cache": False, "plan": plan}


def _train_step(model: LlamaForCausalLM, context: distca.Context, step: int) -> None:
    batch = _batch(step, context.rank)
    labels = {"labels": batch["input_ids"], "shift_labels": batch["input_ids"]}
    model(**batch, **labels, distca_context=context).loss.backward()


def _evaluate(model: LlamaForCausalLM, context: distca.Context, batch: dict[str, object]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits = model(**batch, distca_context=context).logits
    model.train()
    return logits


def _errors(work: Work, timeout: float = 20.0) -> list[object]:
    plans = [distca.plan(layout, HEADS, tolerance=0.0, min_rows=1) for layout in LAYOUTS]
    with loopback_group(plans, timeout=timeout) as contexts:
        return outcomes(contexts, work)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_with_a_layer_more_on_one_rank_is_an_error_on_both_with_step_and_layer(checkpointing: bool) -> None:
    models = [_model(layers=2), _model(layers=3)]
    if checkpointing:
        for model in models:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    errors = _errors(lambda rank, context: _train_step(models[rank], context, 0))
    # Checkpointing runs layer 1 of rank 0 forward again, while rank 1 comes to its layer 2.
    phase = "forward" if checkpointing else "backward"
    for error, place in zip(
        errors,
        [
            ("layer 1 (LlamaAttention)", f"rank 0 of 2, step 3 ({phase})"),
            ("layer 2 (LlamaAttention)", "rank 1 of 2, step 3 (forward)"),
        ],
        strict=True,
    ):
        assert isinstance(error, distca.PlanMismatchError), error
        assert str(error).startswith(f"{place[0]}: context ") and place[1] in str(error), error
        assert str(error).endswith(ADVICE)


@pytest.mark.parametrize("skipped", [{0: 1}, {0: 1, 1: 2}], ids=["one rank", "both, different layers"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_layer_that_is_skipped_on_one_rank_is_an_error_before_the_rows_of_two_layers_mix(
    skipped: dict[int, int], trains: bool
) -> None:
    models = [_model(layers=4), _model(layers=4)]
    for rank, layer in skipped.items():
        attention = models[rank].model.layers[layer].self_attn
        attention.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)

    def work(rank: int, context: distca.Context) -> object:
        if trains:
            return _train_step(models[rank], context, 0)
        return _evaluate(models[rank], context, _batch(0, rank))

    for rank, error in enumerate(_errors(work)):
        assert isinstance(error, distca.PlanMismatchError), error
        assert str(error).startswith(f"layer {2 - rank} (LlamaAttention): ") and str(error).endswith(ADVICE), error
        assert "step 2 (forward)" in str(error), error
        assert "layer 2 on rank 0" in str(error) and "layer 1 on rank 1" in str(error), error


def _wrong_positions(batch: dict[str, object]) -> None:
    batch["position_ids"] = batch["position_ids"] + 1


def _no_plan(batch: dict[str, object]) -> None:
    del batch["plan"]


def _two_rows(batch: dict[str, object]) -> None:
    batch["input_ids"] = batch["input_ids"].repeat(2, 1)


def _padding(batch: dict[str, object]) -> None:
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (_wrong_positions, "position_ids are not those of the plan"),
        (_no_plan, "no plan in a training step of rank 1 of 2"),
        (_two_rows, "batch size is 2, must be 1"),
        (_padding, "attention_mask marks padding"),
    ],
)
def test_what_a_model_refuses_on_one_rank_is_told_to_its_peer_at_once(
    mistake: Callable[[dict[str, object]], None], said: str
) -> None:
    models = [_model(), _model()]

    def work(rank: int, context: distca.Context) -> None:
        _train_step(models[rank], context, 0)
        batch = _batch(1, rank)
        if rank == 1:
            mistake(batch)
        models[rank](**batch, distca_context=context)

    ours, theirs = _errors(work, timeout=20.0)
    assert isinstance(theirs, distca.InvalidArgumentError) and said in str(theirs), theirs
    assert isinstance(ours, distca.PeerLeftError) and "rank 1" in str(ours) and said in str(ours), ours


def test_evaluation_with_a_plan_on_one_rank_while_the_other_trains_is_an_error_on_both() -> None:
    models = [_model(), _model()]

    def work(rank: int, context: distca.Context) -> None:
        _train_step(models[rank], context, 0)
        if rank == 0:
            _evaluate(models[rank], context, _batch(2, rank))
        _train_step(models[rank], context, 1)

    for rank, error in enumerate(_errors(work)):
        assert isinstance(error, distca.PlanMismatchError), error
        assert str(error).startswith("layer 0 (LlamaAttention): ") and str(error).endswith(ADVICE)
        assert f"rank {rank} of 2, step 5 (forward)" in str(error)


def test_evaluation_with_a_plan_on_one_rank_while_the_other_waits_for_it_is_a_timeout_on_both() -> None:
    models, evaluated = [_model(), _model()], threading.Event()

    def work(rank: int, context: distca.Context) -> None:
        _train_step(models[rank], context, 0)
        if rank == 0:
            try:
                _evaluate(models[rank], context, _batch(1, rank))
            finally:
                evaluated.set()
        assert evaluated.wait(20.0)  # this rank waits as it would in a barrier
        _train_step(models[rank], context, 1)

    for rank, error in enumerate(_errors(work, timeout=0.5)):
        assert isinstance(error, distca.PeerTimeoutError), error
        message = str(error)
        assert message.startswith("layer 0 (LlamaAttention): ") and f"rank {rank} of 2, step 5 (forward)" in message
        assert ("waited 0.5 s for rank 1" if rank == 0 else "rank 0 gave up waiting for rank 1") in message
        assert "fewer calls of core_attention" in message
        assert message.endswith("a model that is evaluated on one rank alone gets no plan there")


def test_evaluation_without_a_plan_on_one_rank_disturbs_nobody_and_gives_what_sdpa_gives() -> None:
    models, sdpa = [_model(), _model()], _model(attention="sdpa").eval()
    ids = torch.randint(2, 61, (1, 48), generator=torch.Generator().manual_seed(9))
    positions = torch.cat([torch.arange(30), torch.arange(18)])[None]

    def work(rank: int, context: distca.Context) -> torch.Tensor | None:
        logits = None
        for step in range(2):
            _train_step(models[rank], context, step)
            if rank == 0:
                batch = {"input_ids": ids, "position_ids": positions, "use_cache": False}
                logits = _evaluate(models[rank], context, batch)
        assert context.step == 8
        return logits

    found, nothing = _errors(work)
    assert nothing is None and isinstance(found, torch.Tensor), (found, nothing)
    with torch.no_grad():
        expected = torch.cat([sdpa(part, use_cache=False).logits for part in ids.split([30, 18], dim=1)], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
