"""An unmodified Llama with attn_implementation="distca": SDPA's gradients, or an error for what no plan can express."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.masking_utils import create_causal_mask

import distca
import distca.integrations.hf
from distca.apps.common.packing import NO_TARGET
from distca.apps.train.checkpoint import Trained
from distca.apps.train.data import Batch
from distca.apps.train.data_parallel import MicroBatches
from distca.apps.train.micro_batches import MicroBatch
from distca.apps.train.step import train_step
from distca.context import find_context
from support.ranks import launch

HEADS = distca.Heads(q=4, kv=2, dim=8)
VOCABULARY = 61

# For each rank: its segments (document, begin, end), and how many of its rows have a target (None: all that can).
CASES = {
    "ten targets against a thousand": ([[(0, 0, 50), (1, 0, 13)], [(1, 13, 700), (2, 0, 331)]], (10, 1000)),
    "whole documents": ([[(0, 0, 97)], [(1, 0, 3), (2, 0, 1), (3, 0, 64)]], (None, None)),
    "a document over both ranks": ([[(0, 0, 40)], [(0, 40, 101), (1, 0, 19)]], (None, 0)),
    "padding alone on a rank": ([[(0, 0, 40), (1, 0, 5), (-1, 0, 3)], [(-1, 0, 1)]], (None, None)),
}
CASE_NAMES = list(CASES)


def _model(attention: str, **options: object) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS.q,
        num_key_value_heads=HEADS.kv,
        max_position_embeddings=2048,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation=attention,
        **options,
    )
    return LlamaForCausalLM(config).train()


def _documents(layout: distca.Layout) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(layout.document_lengths))
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in layout.document_lengths]


def _targets(name: str) -> tuple[distca.Layout, list[torch.Tensor], list[torch.Tensor]]:
    """The layout, and the tokens and targets of each document. Targets are shifted before the cut, then thinned out."""
    ranks, wanted = CASES[name]
    layout = distca.Layout(ranks)
    tokens = _documents(layout)
    targets = [torch.cat([document[1:], torch.tensor([NO_TARGET])]) for document in tokens]
    for rank, keep in enumerate(wanted):
        if keep is None:
            continue
        for document, begin, end in layout.segments(rank):
            rows = targets[document][begin:end]
            valid = (rows != NO_TARGET).nonzero().flatten()
            rows[valid[keep:]] = NO_TARGET
            keep -= min(keep, len(valid))
    return layout, tokens, targets


def _batch(name: str, rank: int) -> Batch:
    layout, tokens, targets = _targets(name)

    def rows(values: list[torch.Tensor], padding: int) -> torch.Tensor:
        parts = [
            values[document][begin:end] if document >= 0 else torch.full((end - begin,), padding)
            for document, begin, end in layout.segments(rank)
        ]
        return torch.cat(parts).unsqueeze(0)

    num_targets = sum(int((document != NO_TARGET).sum()) for document in targets)
    return Batch(layout, rows(tokens, 0), rows(targets, NO_TARGET), num_targets)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _loss_and_gradients(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    batch = _batch(name, dist.get_rank())
    model = DistributedDataParallel(_model("distca"))
    plan = distca.plan(batch.layout, HEADS, context="default", tolerance=0.01, min_rows=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the test looks at the gradients after the step
    trained = Trained(model, optimizer, ConstantLR(optimizer))
    work = MicroBatches([MicroBatch([(batch, plan)], batch.num_targets)], [None], find_context("default"))
    result = train_step(trained, work, stop=False, since=0.0)
    return result.loss, _gradients(model.module)


def _error_without_a_plan() -> str:
    ids = torch.zeros((1, 4), dtype=torch.int64)
    model = _model("distca")
    with torch.no_grad():
        model(ids)  # not a training step
    model.eval()(ids)
    with pytest.raises(distca.InvalidArgumentError) as caught:
        model.train()(ids)
    return str(caught.value)


def _all_cases() -> tuple[list[tuple[float, dict[str, torch.Tensor]]], str]:
    with distca.init(max_tokens=1100, heads=HEADS, timeout=60):
        return [_loss_and_gradients(name) for name in CASE_NAMES], _error_without_a_plan()


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[list[tuple[float, dict[str, torch.Tensor]]], str]]:
    return launch(_all_cases, ranks=2)


def _reference(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by transformers' own SDPA, one document at a time, in one process."""
    _, tokens, targets = _targets(name)
    num_targets = sum(int((document != NO_TARGET).sum()) for document in targets)
    model = _model("sdpa")
    total = 0.0
    for document, labels in zip(tokens, targets, strict=True):
        logits = model(document.unsqueeze(0), use_cache=False).logits[0]
        loss = F.cross_entropy(logits, labels, reduction="sum") / num_targets
        loss.backward()
        total += loss.item()
    return total, _gradients(model)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_two_ranks_have_the_loss_and_gradients_of_one_process_with_sdpa(name: str, two_ranks) -> None:
    loss, gradients = _reference(name)
    for results, _ in two_ranks:
        rank_loss, rank_gradients = results[CASE_NAMES.index(name)]
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert rank_gradients.keys() == gradients.keys()
        for parameter, expected in gradients.items():
            error = (rank_gradients[parameter] - expected).norm() / expected.norm()
            assert error <= 1e-5, f"{parameter}: relative error {error:.2e}"


def test_the_counts_of_targets_are_those_the_case_names() -> None:
    counts = [int((_batch("ten targets against a thousand", rank).labels != NO_TARGET).sum()) for rank in range(2)]
    assert counts == [10, 1000]


def test_a_forgotten_plan_in_training_says_what_to_pass(two_ranks) -> None:
    for rank, (_, message) in enumerate(two_ranks):
        assert (
            f"no plan in a training step of rank {rank} of 2: pass plan=distca.plan(layout, heads, context" in message
        )
        assert "class Balanced(hf.PlanInputs, Trainer)" in message


# ---- one process ----


@pytest.fixture
def one_rank():
    with distca.init(max_tokens=64, heads=HEADS) as context:
        yield context


LAYOUT = distca.Layout([[(0, 0, 5), (1, 0, 3)]])
IDS = torch.arange(8).unsqueeze(0)
POSITIONS = LAYOUT.position_ids(0).unsqueeze(0)


def _plan() -> distca.Plan:
    return distca.plan(LAYOUT, HEADS, rank=0)


@pytest.mark.parametrize("cached", [False, True])
def test_packed_logits_equal_those_of_each_document_alone_and_no_mask_is_built(
    cached: bool, one_rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distca.integrations.hf_masks, "sdpa_mask", lambda **_: pytest.fail("a [T, T] mask was built"))
    options = {"position_ids": POSITIONS, "use_cache": cached, "plan": _plan(), "distca_context": one_rank}
    packed = _model("distca")(IDS, **options).logits
    alone = _model("sdpa")
    expected = torch.cat([alone(part, use_cache=False).logits for part in IDS.split([5, 3], dim=1)], dim=1)
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-6)


def test_a_mask_of_ones_is_accepted(one_rank) -> None:
    model = _model("distca")
    with_mask = model(IDS, position_ids=POSITIONS, attention_mask=torch.ones_like(IDS), plan=_plan()).logits
    assert torch.equal(with_mask, model(IDS, position_ids=POSITIONS, plan=_plan()).logits)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing_changes_nothing(one_rank) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = _model("distca")
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(IDS, position_ids=POSITIONS, labels=IDS, plan=_plan()).loss.backward()
        gradients.append(_gradients(model))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_without_a_plan_attention_is_local_with_the_masks_of_sdpa() -> None:
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    for options in ({}, {"attention_mask": padding}, {"position_ids": POSITIONS, "use_cache": False}):
        ours, sdpa = (_model(name)(IDS, **options).logits for name in ("distca", "sdpa"))
        assert torch.equal(ours, sdpa)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_tokens_of_sdpa(cache: str) -> None:
    prompt, padding = torch.arange(12).view(2, 6), torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    options["disable_compile"] = True
    ours, sdpa = (
        _model(name).eval().generate(prompt, attention_mask=padding, **options) for name in ("distca", "sdpa")
    )
    assert torch.equal(ours, sdpa)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": IDS.repeat(2, 1)}, r"batch size is 2, must be 1: pack the documents"),
        ({"attention_mask": torch.tensor([[0] + [1] * 7])}, r"marks padding, .* pass no attention_mask"),
        ({"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, r"ready-made mask: pass none"),
        ({"input_ids": IDS[:, :7], "position_ids": POSITIONS[:, :7]}, r"7 rows but the plan was made for 8 rows"),
        (
            {"position_ids": None},
            r"left out, .* not the numbers of the rows \(row 5 of rank 0 has position 0 in document 1\)",
        ),
        ({"position_ids": POSITIONS.flip(1)}, r"pass position_ids=plan.layout.position_ids"),
        ({"plan": _plan().tensor}, r"plan is a Tensor, must be a distca.Plan"),
        (
            {"plan": distca.plan(LAYOUT, HEADS, rank=0), "is_causal": False},
            r"mask is causal, .* the full mask: .*mask='full'|this layer is not causal",
        ),
        ({"plan": distca.plan(LAYOUT, HEADS, rank=0, mask="full")}, r"mask is full, .* the causal .*mask='causal'"),
        (
            {"plan": distca.plans(LAYOUT, HEADS, windows=[None], rank=0, mask="full")},
            r"mask is full, .* asks for the causal mask",
        ),
    ],
)
def test_what_a_plan_cannot_mean_is_refused_with_what_to_do(options: dict, message: str) -> None:
    arguments = {"input_ids": IDS, "position_ids": POSITIONS, "plan": _plan(), **options}
    with pytest.raises(distca.InvalidArgumentError, match=message):
        _model("distca")(**arguments)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_plan_of_another_dtype_says_which_heads_to_give(autocast: bool) -> None:
    model = _model("distca") if autocast else _model("distca").bfloat16()
    refused = pytest.raises(
        distca.InvalidArgumentError, match=r"of torch.float32: .*heads_of\(model.config, torch.bfloat16"
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), refused:
        model(IDS, position_ids=POSITIONS, plan=_plan())


def test_a_plan_in_a_step_that_continues_from_a_cache_is_refused() -> None:
    model = _model("distca")
    cache = model.eval()(IDS[:, :4]).past_key_values
    with pytest.raises(distca.InvalidArgumentError, match="12 keys for 8 rows: .* pass use_cache=False"):
        model.train()(IDS, position_ids=POSITIONS, past_key_values=cache, plan=_plan())


def test_dropout_in_training_is_refused() -> None:
    with pytest.raises(distca.InvalidArgumentError, match=r"dropout is 0.1, must be 0: set attention_dropout=0.0"):
        _model("distca", attention_dropout=0.1)(IDS, position_ids=POSITIONS, plan=_plan())


def test_a_plan_of_another_window_is_refused_only_where_a_document_shows_the_difference(one_rank) -> None:
    def logits(window: int | None) -> torch.Tensor:
        torch.manual_seed(7)
        config = MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=HEADS.q,
            num_key_value_heads=HEADS.kv,
            head_dim=HEADS.dim,
            sliding_window=window,
            attn_implementation="distca",
        )
        return MistralForCausalLM(config)(IDS, position_ids=POSITIONS, use_cache=False, plan=_plan()).logits

    assert torch.equal(logits(5), logits(None))
    with pytest.raises(
        distca.InvalidArgumentError,
        match=r"window of 4, the plan one of None: pass .*window=4",
    ):
        logits(4)


def test_padding_beside_documents_with_a_window_runs_in_layers_of_any_window() -> None:
    """Document 0, on another rank, says nothing of a rank that has padding alone."""
    layout = distca.Layout([[(0, 0, 8)], [(-1, 0, 8)]])
    plan = distca.plan(layout, HEADS, rank=1, scores=[distca.Scores(window=4)])
    assert all(distca.integrations.hf._plan_of_layer(plan, window, "causal") is plan for window in (None, 3, 4))
    with pytest.raises(distca.InvalidArgumentError, match="window of 3, the plan one of 4"):
        distca.integrations.hf._plan_of_layer(plan.for_rank(0), 3, "causal")


def test_a_layer_that_is_not_causal_and_asks_for_no_mask_is_refused() -> None:
    q, kv = torch.zeros(1, 4, 8, 8), torch.zeros(1, 2, 8, 8)
    with pytest.raises(
        distca.InvalidArgumentError, match='not causal, and .* the full mask. .*"vision_config": "sdpa"'
    ):
        distca.integrations.hf.distca_attention(torch.nn.Identity(), q, kv, kv, None, plan=_plan(), is_causal=False)


def _mask_request(**options: object) -> dict[str, object]:
    def causal(batch, head, q, kv):
        return kv <= q

    return {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": causal, "device": "cpu", **options}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vmap": True}, "a mask of its own"),
        ({"mask_function": lambda batch, head, q, kv: (kv <= q) | (kv // 4 == q // 4)}, "not causal"),
        ({"local_size": 4}, "chunks of 4"),
    ],
)
def test_masks_that_models_lay_over_the_causal_one_are_refused(options: dict, message: str) -> None:
    hf = distca.integrations.hf
    mask = hf.distca_mask(**_mask_request(**options))
    q, kv = torch.zeros(1, 4, 8, 8), torch.zeros(1, 2, 8, 8)
    with pytest.raises(distca.InvalidArgumentError, match=message):
        hf.distca_attention(torch.nn.Identity(), q, kv, kv, mask, plan=_plan())


@pytest.mark.skipif(
    "block_sequence_ids" not in inspect.signature(create_causal_mask).parameters,
    reason="transformers has no blocks yet",
)
@pytest.mark.parametrize("positions", [None, POSITIONS])
@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_over_a_causal_mask_are_refused_in_a_graph_too(is_causal: bool, positions: torch.Tensor | None) -> None:
    """A graph cannot look into the mask. A call outside of it compares the blocks with the layout. With positions,
    documents come on top of it.
    """
    config = LlamaConfig(hidden_size=32, num_attention_heads=HEADS.q, attn_implementation="distca")
    blocks = {} if is_causal else {"block_sequence_ids": torch.tensor([[0, 0, 0, -1, -1, -1, -1, -1]])}

    def objection(embeds: torch.Tensor) -> str | None:
        mask = create_causal_mask(config, embeds, None, None, position_ids=positions, **blocks)
        return mask.objection()

    embeds = torch.zeros(1, 8, 32)
    assert objection(embeds) is None
    found = torch.compile(objection, backend="eager", fullgraph=True)(embeds)
    assert found is None if is_causal else "a mask that is not causal" in found
