"""Padded batches of a model that went through `hf.unpad`: the model's own results on them, of fewer rows."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distca
from distca.integrations import hf
from support.models import GQA, SIZES, VOCABULARY
from support.ranks import launch

PAD = 0
HEADS = GQA
#: For each rank's batch its width, and the places of each row's document: (first row, end). Rank 1 has long ones, and
#: in its third row padding alone; all of rank 2's is padding.
BATCHES = [
    (20, [(0, 20), (7, 12), (3, 19)]),
    (150, [(0, 150), (30, 141), (0, 0)]),
    (9, [(0, 0), (0, 0)]),
]
CASES = ["loss", "prompts", "checkpointed", "reentrant", "hidden states", "classes"]


def _model(attention: str, kind: Any = transformers.LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(7)
    config = kind.config_class(**SIZES | {"pad_token_id": PAD} | options, attn_implementation=attention)
    return kind(config).train()


def _batch(rank: int) -> dict[str, torch.Tensor]:
    """Padded rows, of which all long ones begin alike."""
    width, places = BATCHES[rank]
    generator = torch.Generator().manual_seed(rank)
    tokens, mask = torch.full((len(places), width), PAD), torch.zeros(len(places), width, dtype=torch.int64)
    prompt = torch.randint(1, VOCABULARY, (100,), generator=torch.Generator().manual_seed(9))
    for row, (first, end) in enumerate(places):
        tokens[row, first:end] = torch.randint(1, VOCABULARY, (end - first,), generator=generator)
        tokens[row, first : min(end, first + 100)] = prompt[: min(end - first, 100)]
        mask[row, first:end] = 1
    labels = tokens.masked_fill(mask == 0, -100)
    for row, (first, end) in enumerate(places):
        labels[row, first : first + (end > first)] = -100  # padding before it has no target
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _case(name: str, attention: str) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """The model of a case, and its batch on a rank."""
    if name == "classes":
        model = _model(attention, transformers.LlamaForSequenceClassification, num_labels=3)
        rows = [_batch(rank) for rank in range(len(BATCHES))]
        # A row of padding alone has no last token, also without distca.
        kept = [rows[rank]["attention_mask"].any(1) if rank < 2 else torch.tensor([True, False]) for rank in range(3)]
        rows[2]["attention_mask"][0, :2], rows[2]["input_ids"][0, :2] = 1, torch.tensor([5, 9])
        of_rows = [
            {key: of[key][keep] for key in ("input_ids", "attention_mask")} for of, keep in zip(rows, kept, strict=True)
        ]
        return model, lambda rank: of_rows[rank] | {"labels": torch.arange(len(of_rows[rank]["input_ids"])) % 3}
    model = _model(attention)
    if name in ("checkpointed", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": name == "reentrant"})
    return model, lambda rank: _batch(rank) | {"output_hidden_states": name == "hidden states"}


def _outputs(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """Loss, gradients, and the results of all rows that are no padding."""
    output = model(**batch)
    loss = output.loss if bool((batch["labels"] != -100).any()) else output.logits.sum() * 0  # else it is NaN
    loss.backward()
    found = [output.logits, *(output.hidden_states or ())]
    if output.logits.dim() == 3:
        found = [rows[batch["attention_mask"].bool()].flatten() for rows in found]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, torch.cat([rows.detach().flatten() for rows in found])


def _on_ranks() -> list[Any]:
    results = []
    with distca.init(max_tokens=450, heads=HEADS, timeout=60) as context:
        for name in CASES:
            model, batch = _case(name, "distca")
            hf.unpad(model, share_prompts=name == "prompts", tolerance=0.01, min_rows=1)
            before = context.step
            results.append((*_outputs(model, batch(context.rank)), context.step - before))
        model, batch = _case("loss", "distca")
        hf.unpad(model, tolerance=0.01, min_rows=1)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (3,)))
        loss, gradients, rows = _outputs(model, batch(context.rank))
        results.append((loss, {name: gradient.full_tensor() for name, gradient in gradients.items()}, rows))
    return results


@pytest.fixture(scope="module")
def ranks() -> list[list[Any]]:
    return launch(_on_ranks, ranks=3)


@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_results_of_the_models_own_attention_on_padded_batches(name: str, ranks) -> None:
    for rank, of_rank in enumerate(ranks):
        model, batch = _case(name, "sdpa")
        loss, gradients, rows = _outputs(model, batch(rank))
        rank_loss, rank_gradients, rank_rows, steps = of_rank[CASES.index(name)]
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert (rank_rows - rows).norm() <= 2e-6 * rows.norm()
        assert rank_gradients.keys() == gradients.keys()
        for parameter, expected in gradients.items():
            assert (rank_gradients[parameter] - expected).norm() <= 1e-5 * expected.norm(), parameter
        recomputed = name in ("checkpointed", "reentrant")
        assert steps == 2 * (3 if recomputed else 2), "attention went another way"


def test_ranks_that_share_the_weights_have_the_mean_of_their_gradients(ranks) -> None:
    """FSDP2, whose weights are gathered while the model computes packed rows."""
    alone = []
    for rank, of_rank in enumerate(ranks):
        model, batch = _case("loss", "sdpa")
        loss, gradients, rows = _outputs(model, batch(rank))
        rank_loss, _, rank_rows = of_rank[len(CASES)]
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert (rank_rows - rows).norm() <= 2e-6 * rows.norm()
        alone.append(gradients)
    for name, found in ranks[0][len(CASES)][1].items():
        expected = sum(gradients[name] for gradients in alone) / len(ranks)
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name


# ---- one process ----


@pytest.fixture
def one_rank():
    with distca.init(max_tokens=600, heads=HEADS) as context:
        yield context


def _rows_of(model: Any, batch: dict[str, Any]) -> int:
    """How many rows the model's layers compute."""
    seen: list[int] = []
    hook = model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    with torch.no_grad():
        model(**batch)
    hook.remove()
    (rows,) = seen
    return rows


def test_padding_and_beginnings_that_are_alike_are_not_computed(one_rank) -> None:
    batch = _batch(1)
    assert _rows_of(_model("sdpa"), batch) == 150
    assert _rows_of(hf.unpad(_model("distca")), batch) == 150 + 111
    assert _rows_of(hf.unpad(_model("distca"), share_prompts=True), batch) == 150 + 11
    batch["input_ids"][0, 15] = 1 + batch["input_ids"][0, 15] % (VOCABULARY - 1)  # 15 rows are too few to be shared
    assert _rows_of(hf.unpad(_model("distca"), share_prompts=True), batch) == 150 + 111


def test_documents_that_are_alike_have_a_row_of_their_own_each(one_rank) -> None:
    tokens = torch.arange(1, 31).repeat(3, 1)
    tokens[2, 25] = 40
    batch = {"input_ids": tokens}
    model = hf.unpad(_model("distca"), share_prompts=True)
    assert _rows_of(model, batch) == 30 + 1 + 5
    assert torch.allclose(model(**batch).logits, _model("sdpa")(**batch).logits, atol=1e-6)


def test_position_ids_tell_packed_documents_apart_beside_padding(one_rank) -> None:
    tokens = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(tokens)
    mask[1, :3], mask[1, 10:] = 0, 0
    positions = torch.tensor([[*range(5), *range(7)], [9, 9, 9, *range(2), *range(5), 0, 0]])
    logits = hf.unpad(_model("distca"))(tokens, attention_mask=mask, position_ids=positions).logits
    alone = _model("sdpa").eval()
    for row, first, end in ((0, 0, 5), (0, 5, 12), (1, 3, 5), (1, 5, 10)):
        expected = alone(tokens[row : row + 1, first:end]).logits
        assert torch.allclose(logits[row, first:end], expected[0], atol=1e-6)


def test_the_first_of_four_axes_of_positions_tells_packed_documents_apart() -> None:
    """As in transformers: it counts the rows of text, and the other three are of images."""
    kind = transformers.Qwen2_5_VLTextModel
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    tokens = torch.randint(1, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(4))
    positions = torch.tensor([[*range(7), *range(5)]]).expand(4, 1, 12)
    options = {"rope_parameters": rope, "head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 2}
    with distca.init(max_tokens=64, heads=distca.Heads(4, 2, 8), name="axes"):
        model = hf.unpad(_model("distca", kind, **options), distca_context="axes")
        found = model(tokens, position_ids=positions).last_hidden_state
    plain = _model("sdpa", kind, **options)
    for first, end in ((0, 7), (7, 12)):
        assert torch.allclose(found[0, first:end], plain(tokens[:, first:end]).last_hidden_state[0], atol=1e-6)


def test_results_of_streams_are_padded_as_those_of_rows(one_rank) -> None:
    options: dict[str, Any] = {"hidden_size_per_layer_input": 4, "altup_num_inputs": 3, "laurel_rank": 2}
    options |= {
        "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"] * 2,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    options |= {"activation_sparsity_pattern": [0.0] * 2, "intermediate_size": [48] * 2}
    batch = {name: _batch(0)[name] for name in ("input_ids", "attention_mask")}
    found, expected = (
        model(**batch, output_hidden_states=True).hidden_states
        for model in (
            hf.unpad(_model("distca", transformers.Gemma3nForCausalLM, **options)),
            _model("sdpa", transformers.Gemma3nForCausalLM, **options),
        )
    )
    keep = batch["attention_mask"].bool()
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours[..., keep, :], theirs[..., keep, :], atol=1e-5)


def test_pytorch_s_default_device_is_of_no_account(one_rank) -> None:
    batch, model = _batch(0), hf.unpad(_model("distca"), share_prompts=True)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    packed = {"input_ids": torch.arange(1, 9)[None], "position_ids": torch.arange(8)[None]}
    with torch.no_grad():
        expected, expected_packed = model(**batch).loss, model(**hf.plan_inputs(packed, model)).logits
        with torch.device("meta"):
            assert torch.equal(model(**batch).loss, expected)
            assert torch.equal(model(**hf.plan_inputs(packed, model)).logits, expected_packed)


def test_an_empty_cache_in_training_is_left_out(one_rank) -> None:
    batch, model = _batch(0), hf.unpad(_model("distca"))
    loss = model(**batch, past_key_values=transformers.DynamicCache(config=model.config), use_cache=True).loss
    assert one_rank.step == SIZES["num_hidden_layers"]
    assert loss.item() == pytest.approx(_model("sdpa")(**batch).loss.item(), rel=1e-6)


def test_a_cache_that_a_planned_call_did_not_make_is_missed(one_rank) -> None:
    model = hf.unpad(_model("distca")).eval()
    with torch.no_grad():
        output = model(torch.arange(1, 9)[None])
        with pytest.raises(distca.InvalidArgumentError, match="which makes none: pass use_cache=True to that call"):
            model(torch.tensor([[5]]), past_key_values=output.past_key_values)
        assert model(torch.arange(1, 9)[None], use_cache=False).past_key_values is None
        first = model(torch.arange(1, 9)[None], use_cache=True)
        again = model(torch.tensor([[9]]), past_key_values=first.past_key_values)
        assert torch.allclose(again.logits[0, 0], model(torch.arange(1, 10)[None]).logits[0, -1], atol=1e-6)


def test_as_many_columns_as_rows_are_no_numbers_of_documents(one_rank) -> None:
    tokens = torch.arange(1, 17).reshape(4, 4)
    found = hf.unpad(_model("distca"))(tokens, cache_position=torch.arange(4)).logits
    assert torch.allclose(found, _model("sdpa")(tokens).logits, atol=1e-6)


def test_routers_see_the_rows_that_they_see_without_it(one_rank) -> None:
    options = {"num_local_experts": 4, "router_aux_loss_coef": 0.5, "output_router_logits": True}
    batch, losses = _batch(0), []
    for attention in ("sdpa", "distca"):
        model = _model(attention, transformers.MixtralForCausalLM, **options)
        output = (hf.unpad(model) if attention == "distca" else model)(**batch)
        losses.append((output.loss.item(), output.aux_loss.item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][1] > 0
    shared = hf.unpad(_model("distca", transformers.MixtralForCausalLM, **options), share_prompts=True)
    with pytest.raises(distca.InvalidArgumentError, match="routers' loss counts shared rows once"):
        shared(**batch)


def test_a_graph_of_the_whole_model_leaves_the_packing_out(one_rank) -> None:
    batch = _batch(0)
    expected = _model("sdpa")(**batch).loss
    torch._dynamo.reset()  # frames that were left to Python before are compiled again
    compiled = torch.compile(hf.unpad(_model("distca")), backend="eager")
    assert compiled(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-6)


LOCAL: dict[str, Callable[[Any, dict[str, torch.Tensor]], Any]] = {
    "generate": lambda model, batch: model.generate(**batch, max_new_tokens=3, do_sample=False),
    "generate without a cache": lambda model, batch: model.generate(
        **batch, max_new_tokens=3, do_sample=False, use_cache=False
    ),
    "use_cache": lambda model, batch: model(**batch, use_cache=True).logits[batch["attention_mask"].bool()],
    "a cache": lambda model, batch: model(
        **batch, past_key_values=transformers.DynamicCache(config=model.config)
    ).logits[batch["attention_mask"].bool()],
    "local": lambda model, batch: _locally(model, batch),
}


def _locally(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with hf.local():
        return model(**batch).logits[batch["attention_mask"].bool()]


@pytest.mark.parametrize("how", LOCAL)
def test_one_rank_may_compute_alone(how: str, one_rank) -> None:
    batch = {name: _batch(0)[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found, expected = (LOCAL[how](model.eval(), batch) for model in (hf.unpad(_model("distca")), _model("sdpa")))
    assert torch.equal(found, expected)
    assert one_rank.step == 0


def test_without_a_context_and_with_another_attention_a_model_is_as_before() -> None:
    batch, model = _batch(0), hf.unpad(_model("distca"))
    keep = batch["attention_mask"].bool()
    expected = _model("sdpa")(**batch).logits[keep]
    assert torch.equal(model.eval()(**batch).logits[keep], expected)
    with distca.init(max_tokens=600, heads=HEADS) as context:
        model.set_attn_implementation("sdpa")
        assert torch.equal(model.train()(**batch).logits[keep], expected)
        assert context.step == 0


def test_copies_of_a_model_pack_and_a_plan_counts_before_it(one_rank) -> None:
    model, batch = copy.deepcopy(hf.unpad(_model("distca"))), _batch(0)
    assert _rows_of(model, batch) == 20 + 5 + 16
    packed = {"input_ids": torch.arange(1, 9)[None], "position_ids": torch.arange(8)[None]}
    assert _rows_of(model, hf.plan_inputs(packed, model)) == 8


ENCODER: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "num_key_value_heads": None,
    "head_dim": None,
}


@pytest.fixture
def encoder_rank():
    with distca.init(max_tokens=64, heads=distca.Heads(4, 4, 8), name="encoder") as context:
        yield context


@pytest.mark.parametrize("rows", [1, 32, 40])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_a_pooler_gets_padded_rows(as_tuple: bool, rows: int, encoder_rank) -> None:
    """As many rows as its result is wide, too, and as many as it is."""
    tokens, mask = torch.arange(1, 41)[None], torch.ones(1, 40, dtype=torch.int64)
    mask[0, rows:] = 0
    model = hf.unpad(_model("distca", transformers.BertModel, **ENCODER), distca_context="encoder")
    found = model(tokens, attention_mask=mask, return_dict=not as_tuple)
    expected = _model("sdpa", transformers.BertModel, **ENCODER)(tokens, attention_mask=mask, return_dict=not as_tuple)
    assert isinstance(found, tuple) == as_tuple
    assert torch.allclose(found[1], expected[1], atol=1e-6)
    assert torch.allclose(found[0][0, :rows], expected[0][0, :rows], atol=1e-5)


def test_an_encoder_with_a_pooler_sorts_documents_into_classes(encoder_rank) -> None:
    tokens = torch.randint(1, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(20) < torch.tensor([[20], [3], [12]])).long()
    kind, labels = transformers.BertForSequenceClassification, torch.tensor([0, 2, 1])
    model = hf.unpad(hf.unpad(_model("distca", kind, num_labels=3, **ENCODER)), distca_context="encoder")
    plain = _model("sdpa", kind, num_labels=3, **ENCODER)
    found, expected = (one(tokens, attention_mask=mask, labels=labels) for one in (copy.deepcopy(model), plain))
    assert torch.allclose(found.logits, expected.logits, atol=1e-6)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert encoder_rank.step == SIZES["num_hidden_layers"]


TOKENS = torch.ones(2, 4, dtype=torch.int64)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a hole": (
        lambda: hf.unpad(_model("distca"))(TOKENS, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])),
        "hides rows of row 1 of the batch between others",
    ),
    "a mask of pairs": (
        lambda: hf.unpad(_model("distca"))(TOKENS, attention_mask=torch.ones(2, 1, 4, 4)),
        r"takes attention_mask \[2, 4\], as of its rows, and not \[2, 1, 4, 4\]",
    ),
    "positions that do not begin at 0": (
        lambda: hf.unpad(_model("distca"))(TOKENS, position_ids=torch.arange(3, 7)[None]),
        "position_ids of row 0 of the batch do not count each document from 0",
    ),
    "positions of other rows": (
        lambda: hf.unpad(_model("distca"))(TOKENS, position_ids=torch.arange(5)[None]),
        r"position_ids are \[1, 5\], must be \[2, 4\]",
    ),
    "embeddings with shared prompts": (
        lambda: hf.unpad(_model("distca"), share_prompts=True)(inputs_embeds=torch.ones(2, 4, 32)),
        "finds rows that are alike by their tokens, and this model gets inputs_embeds",
    ),
    "a wrapper": (
        lambda: hf.unpad(torch.nn.parallel.DataParallel(_model("distca"))),
        "not DataParallel.*wrap the model by DDP or FSDP after unpad",
    ),
    "another attention": (lambda: hf.unpad(_model("sdpa")), r'set_attn_implementation\("distca"\)'),
    "no rows": (lambda: hf.unpad(_model("distca"))(TOKENS[:0]), r"of at least one row, and not \[0, 4\]"),
    "positions in a list": (
        lambda: hf.unpad(_model("distca"))(TOKENS, position_ids=[0, 1, 2, 3]),
        r"position_ids are list, must be \[2, 4\]",
    ),
    "a number for each document": (
        lambda: hf.unpad(_model("distca"))(TOKENS, lang_ids=torch.tensor([0, 1])),
        "lang_ids has a number for each row of the batch",
    ),
    "an option that no plan has": (
        lambda: hf.unpad(_model("distca"), tolerence=0.1),
        "unpad has no option 'tolerence': beside its own it takes tolerance, min_rows, retain_bytes",
    ),
    "halves afterwards": (lambda: hf.ping_pong(hf.unpad(_model("distca"))), "padded batches have no halves"),
    "halves": (lambda: hf.unpad(hf.ping_pong(_model("distca"))), "the model is in ping-pong"),
    "an encoder with shared prompts": (
        lambda: hf.unpad(_model("distca", is_causal=False), share_prompts=True),
        "share_prompts is for causal models",
    ),
    "a model that counts rows": (
        lambda: hf.unpad(
            transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2, attn_implementation="distca")
            )
        )(TOKENS),
        "takes no position_ids: it counts the rows of the tensor",
    ),
    "no tokens": (lambda: hf.unpad(_model("distca"))(attention_mask=TOKENS), r"takes input_ids \[B, L\]"),
    "a graph of everything": (
        lambda: torch.compile(hf.unpad(_model("distca")), backend="eager", fullgraph=True)(TOKENS),
        r"outside of graphs \(hf.unpad\)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_take_is_refused_with_what_to_do(what: str, one_rank) -> None:
    torch._dynamo.reset()  # frames that were left to Python before are compiled again
    call, said = REFUSED[what]
    with pytest.raises(Exception, match=said) as caught:
        call()
    assert what == "a graph of everything" or isinstance(caught.value, distca.InvalidArgumentError)
    assert one_rank.step == 0


# ---- ranks whose calls differ ----


def _wrong_calls() -> dict[str, str]:
    """What each rank's wrong call raises. The calls after them match again."""
    rank, found = torch.distributed.get_rank(), {}

    def call(name: str, wrong: Callable[[], Any]) -> None:
        try:
            wrong()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    model = hf.unpad(_model("distca"), min_rows=1)

    def evaluated() -> Any:
        with torch.no_grad():
            return model(TOKENS)

    def trained() -> Any:
        return model(TOKENS).logits.sum().backward()

    def locally() -> Any:
        with hf.local():
            return trained()

    with distca.init(max_tokens=64, heads=HEADS, timeout=3) as context:
        trained()
        call("no rows", lambda: model(TOKENS[: rank * 2]))
        call("another error", lambda: model(TOKENS, attention_mask=torch.ones(2, 4, device="meta" if rank else "cpu")))
        call("gradients", trained if rank else evaluated)
        trained()
        found["steps"] = f"{context.step}"
        with torch.no_grad():
            held = model(TOKENS, use_cache=True).past_key_values
        call("a cache", lambda: model(TOKENS, past_key_values=held))
    with distca.init(max_tokens=64, heads=HEADS, timeout=3):
        call("local", locally)
    with distca.init(max_tokens=64, heads=HEADS, timeout=3):
        trained()
        of_ranks: list[Any] = [None, None]
        if rank == 1:
            call("alone", evaluated)
        torch.distributed.all_gather_object(of_ranks, f"of rank {rank}")
        found["another group"] = ", ".join(of_ranks)
    return found


@pytest.fixture(scope="module")
def wrong_calls() -> list[dict[str, str]]:
    return launch(_wrong_calls, ranks=2)


@pytest.mark.parametrize(
    ("name", "on_rank_0", "on_rank_1"),
    [
        ("no rows", *2 * ["^InvalidArgumentError: rank 0: .*of at least one row, and not \\[0, 4\\]"]),
        ("another error", "^PeerLeftError: rank 1: NotImplementedError: .*meta", "^NotImplementedError: .*meta"),
        ("gradients", *2 * ["^InvalidArgumentError: .*rank 1 calls the model for gradients, and rank 0 under"]),
        ("a cache", *2 * ["^InvalidArgumentError: .*this call has a cache, or is inside of hf.local"]),
        ("local", *2 * ["^InvalidArgumentError: .*this call has a cache, or is inside of hf.local"]),
    ],
)
def test_a_call_that_one_rank_refuses_is_an_error_on_all(
    name: str, on_rank_0: str, on_rank_1: str, wrong_calls
) -> None:
    for rank, said in enumerate((on_rank_0, on_rank_1)):
        assert re.search(said, wrong_calls[rank][name], re.DOTALL), wrong_calls[rank][name]
        assert wrong_calls[rank]["steps"] == str(4 * SIZES["num_hidden_layers"])


def test_a_rank_that_calls_the_model_alone_waits_in_vain_and_disturbs_no_other_collective(wrong_calls) -> None:
    assert wrong_calls[1]["alone"].startswith("PeerTimeoutError: the ranks could not exchange the lengths")
    assert [of["another group"] for of in wrong_calls] == ["of rank 0, of rank 1"] * 2
