"""Models of transformers whose rows see those after them, too: images of Gemma 3 and 4, prefixes of PaliGemma."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers

import distca
from distca.integrations import hf
from support.groups import loopback_group, outcomes

Ranges = dict[int, list[tuple[int, int]]]

LENGTHS = (17, 9, 13)
VOCABULARY = 64
#: Rows of each document that are of images, which may be longer than the window, or of the prefix.
IMAGES: Ranges = {0: [(2, 6), (9, 16)], 1: [(0, 4)], 2: [(1, 9)]}
PREFIXES: Ranges = {0: [(0, 6)], 2: [(0, 13)]}
WINDOW = 5
TEXT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": None},
    **{"max_position_embeddings": 64},
}
OF_BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
VISION = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2}
GEMMA4 = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
GEMMA4 |= {"use_bidirectional_attention": "vision"}
GEMMA4_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "position_embedding_size": 64}
GEMMA4_VISION |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}


class Kind(NamedTuple):
    """A model, the input that marks rows with its value in them and in others, and these rows."""

    name: str
    options: dict[str, Any]
    mark: str
    values: tuple[int, int]
    ranges: Ranges

    def model(self, attention: str) -> Any:
        torch.manual_seed(3)
        config = getattr(transformers, self.name).config_class(**self.options)
        model = getattr(transformers, self.name)._from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() >= 2:  # with transformers' own weights attention is nearly uniform
                    weight.copy_(torch.randn(weight.shape) * 1.5 * weight.shape[-1] ** -0.5)
        return model.train()

    def marks(self, document: int) -> torch.Tensor:
        marks = torch.full((LENGTHS[document],), self.values[1])
        for begin, end in self.ranges.get(document, ()):
            marks[begin:end] = self.values[0]
        return marks


KINDS = {
    "gemma3": Kind(
        "Gemma3ForConditionalGeneration",
        {"text_config": TEXT | OF_BOTH_KINDS, "vision_config": VISION, "mm_tokens_per_image": 4},
        "token_type_ids",
        (1, 0),
        IMAGES,
    ),
    "gemma4": Kind(
        "Gemma4ForConditionalGeneration",
        {"text_config": TEXT | OF_BOTH_KINDS | GEMMA4, "vision_config": GEMMA4_VISION, "audio_config": None},
        "mm_token_type_ids",
        (1, 0),
        IMAGES,
    ),
    "paligemma": Kind(
        "PaliGemmaForConditionalGeneration",
        {"text_config": TEXT | {"model_type": "gemma"}, "vision_config": VISION | {"projection_dim": 32}},
        "token_type_ids",
        (0, 1),
        PREFIXES,
    ),
    "hrm_text": Kind(
        "HrmTextForCausalLM", TEXT | {"prefix_lm": True, "num_key_value_heads": 4}, "token_type_ids", (1, 0), PREFIXES
    ),
}


def _tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY - 4, (length,), generator=generator) for length in LENGTHS]


def _alone(kind: Kind) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The logits of each document by itself, by the model's own attention; the gradients of their sum of squares."""
    model = kind.model("eager")
    logits = []
    for document, tokens in enumerate(_tokens()):
        inputs = {kind.mark: kind.marks(document)[None]}
        logits.append(model(input_ids=tokens[None], use_cache=False, **inputs).logits[0])
    sum(of.square().sum() for of in logits).backward()
    return [of.detach() for of in logits], _gradients(model)


def _gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None]


def _rows_of(layout: distca.Layout, rank: int, documents: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([documents[d][begin:end] for d, begin, end in layout.segments(rank)])[None]


def _plans(kind: str, layout: distca.Layout, config: Any) -> distca.Plans:
    windows = hf.windows_of(config)
    options: dict[str, Any] = {"bidirectional_windows": [WINDOW]} if kind == "gemma4" else {}
    return distca.plans(
        layout, hf.heads_of(config, torch.float32), windows=windows, tolerance=0.0, min_rows=1, **options
    )


LAYOUTS = {
    "whole": distca.Layout.from_documents([[17], [9, 13]]),
    "cut": distca.Layout([[(0, 0, 11), (2, 5, 13)], [(1, 0, 9), (0, 11, 17), (2, 0, 5)]]),
    "head-tail": distca.Layout.head_tail(LENGTHS, ranks=3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_logits_and_gradients_are_those_of_each_document_alone(name: str, layout: str) -> None:
    kind, rows = KINDS[name], LAYOUTS[layout].with_bidirectional(KINDS[name].ranges)
    wanted, gradients = _alone(kind)
    models = [kind.model("distca") for _ in range(rows.num_ranks)]
    plans = _plans(name, rows, models[0].config)

    def run(rank: int, context: distca.Context) -> torch.Tensor:
        inputs = {kind.mark: _rows_of(rows, rank, [kind.marks(d) for d in range(len(LENGTHS))])}
        logits = models[rank](
            input_ids=_rows_of(rows, rank, _tokens()),
            position_ids=rows.position_ids(rank)[None],
            use_cache=False,
            plan=plans.for_rank(rank),
            distca_context=context,
            **inputs,
        ).logits
        logits.square().sum().backward()
        return logits.detach()

    with loopback_group(list(plans.values())) as contexts:
        found = outcomes(contexts, run)
    for rank, logits in enumerate(found):
        assert isinstance(logits, torch.Tensor), logits
        torch.testing.assert_close(logits, _rows_of(rows, rank, wanted), rtol=1e-4, atol=1e-4)
    summed = [sum(parts) for parts in zip(*map(_gradients, models), strict=True)]
    for ours, theirs in zip(summed, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def _run(kind: Kind, layout: distca.Layout, **inputs: Any) -> torch.Tensor:
    """The logits of all documents on one rank, by a plan of the layout, from the marks of the kind unless others are
    given.
    """
    model = kind.model("distca")
    if kind.mark:
        inputs = {kind.mark: torch.cat([kind.marks(d) for d in range(len(LENGTHS))])[None]} | inputs
    plans = _plans("", layout, model.config)
    with loopback_group(list(plans.values())) as [context], torch.no_grad():
        return model(
            input_ids=torch.cat(_tokens())[None],
            position_ids=layout.position_ids(0)[None],
            use_cache=False,
            plan=plans,
            distca_context=context,
            **inputs,
        ).logits[0]


ON_ONE_RANK = distca.Layout.from_documents([LENGTHS])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "ranges", "inputs", "said"),
    [
        ("gemma3", {}, {}, r"rows \[2, 6\) of document 0 see those after them, and the plan's layout says nothing of"),
        ("gemma3", IMAGES | {2: [(1, 8)]}, {}, r"asks that rows \[1, 9\) of document 2 .* layout says \[\(1, 8\)\]"),
        ("gemma3", IMAGES | {2: [(1, 5), (5, 9)]}, {}, r"asks that rows \[1, 9\) of document 2"),
        ("gemma3", IMAGES, {"token_type_ids": None}, r"says that rows \[2, 6\) of document 0 .* asks for nothing of"),
        ("hrm_text", PREFIXES, {"token_type_ids": None}, r"says that rows \[0, 6\) of document 0 .* asks for nothing"),
        ("gemma3", IMAGES | {0: [(2, 6), (9, 16), (16, 17)]}, {}, r"says that rows|two ranges .* touch, at row 16"),
        ("gemma4", IMAGES, {}, r"says that rows \[2, 6\) of document 0 .* asks for nothing of"),
        (
            "paligemma",
            {0: [(0, 6), (8, 10)]},
            {"token_type_ids": torch.tensor([[0] * 6 + [1] * 2 + [0] * 2 + [1] * 29])},
            r"Rows that see each other over others between them are not supported yet",
        ),
    ],
    ids=["none", "others", "two in place of one", "no marks", "no marks of a prefix", "ranges that touch"]
    + ["layers without a window", "not one range"],
)
def test_ranges_that_are_not_those_of_the_model_are_refused(
    name: str, ranges: Ranges, inputs: dict[str, Any], said: str
) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        _run(KINDS[name], ON_ONE_RANK.with_bidirectional(ranges), **inputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prefix", [WINDOW, WINDOW + 1])
def test_a_prefix_that_a_window_does_not_hide_is_at_most_as_long_as_the_window(prefix: int) -> None:
    """PaliGemma 2, whose layers with a window see all of the prefix."""
    text = TEXT | OF_BOTH_KINDS | {"model_type": "gemma2", "query_pre_attn_scalar": 8}
    text |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    kind = KINDS["paligemma"]._replace(
        options={"text_config": text, "vision_config": VISION | {"projection_dim": 32}}, ranges={1: [(0, prefix)]}
    )
    layout = ON_ONE_RANK.with_bidirectional(kind.ranges)
    if prefix > WINDOW:
        with pytest.raises(distca.InvalidArgumentError, match=f"at most {WINDOW} such rows in one range"):
            _run(kind, layout)
        return
    torch.testing.assert_close(_run(kind, layout), torch.cat(_alone(kind)[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_plan_inputs_finds_the_rows_in_the_inputs(name: str) -> None:
    kind = KINDS[name]
    model = kind.model("distca")
    marks = torch.cat([kind.marks(d) for d in range(len(LENGTHS))])[None]
    batch = {"input_ids": torch.cat(_tokens())[None], "position_ids": ON_ONE_RANK.position_ids(0)[None]}
    with distca.init(max_tokens=64, heads=hf.heads_of(model.config, torch.float32)), torch.no_grad():
        logits = model(**hf.plan_inputs(batch | {kind.mark: marks}, model), use_cache=False).logits[0]
        without = hf.plan_inputs(batch, model)["plan"].layout.bidirectional
    torch.testing.assert_close(logits, torch.cat(_alone(kind)[0]), rtol=1e-4, atol=1e-4)
    assert without == {}


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        (lambda marks: marks[0], r"token_type_ids is \[39\]; a tensor \[1, 39\]"),
        (lambda marks: marks[:, :-5], r"token_type_ids is \[1, 34\]"),
        (lambda marks: marks.repeat(2, 1), r"token_type_ids is \[2, 39\]"),
        (lambda marks: marks.tolist(), r"token_type_ids is list"),
        (lambda marks: marks == 1, None),
    ],
    ids=["one dimension", "too short", "two rows", "a list", "bool"],
)
def test_marks_are_those_of_all_rows(marks: Any, said: str | None) -> None:
    kind = KINDS["gemma3"]
    model = kind.model("distca")
    given = marks(torch.cat([kind.marks(d) for d in range(len(LENGTHS))])[None])
    batch = {"position_ids": ON_ONE_RANK.position_ids(0)[None], "token_type_ids": given}
    with distca.init(max_tokens=64, heads=hf.heads_of(model.config, torch.float32)):
        if said is None:
            assert hf.plan_inputs(batch, model)["plan"].layout.bidirectional == IMAGES
            return
        with pytest.raises(distca.InvalidArgumentError, match=said):
            hf.plan_inputs(batch, model)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_of_a_model_with_such_rows_is_refused_where_a_plan_has_some() -> None:
    """Where the call is not one graph, it is the comparison outside of graphs that refuses it."""
    torch._dynamo.reset()
    kind = Kind("Gemma3ForCausalLM", TEXT | OF_BOTH_KINDS, "", (0, 0), {})
    model = torch.compile(kind.model("distca").eval(), backend="eager")
    plans = _plans("", ON_ONE_RANK.with_bidirectional(IMAGES), model.config)
    inputs = {"input_ids": torch.cat(_tokens())[None], "position_ids": ON_ONE_RANK.position_ids(0)[None]}
    with (
        loopback_group(list(plans.values())) as [context],
        pytest.raises(Exception, match=r"rows .*see those after them"),
    ):
        model(**inputs, use_cache=False, plan=plans, distca_context=context)


def test_a_model_that_knows_nothing_of_prefixes_gets_those_of_the_layout() -> None:
    kind = Kind("LlamaForCausalLM", TEXT, "", (0, 0), PREFIXES)
    model, wanted = kind.model("eager"), []
    for document, tokens in enumerate(_tokens()):
        seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        for begin, end in PREFIXES.get(document, ()):
            seen[begin:end, begin:end] = True
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        wanted.append(model(tokens[None], attention_mask=mask, use_cache=False).logits[0])
    logits = _run(kind, ON_ONE_RANK.with_bidirectional(PREFIXES))
    torch.testing.assert_close(logits, torch.cat(wanted), rtol=1e-4, atol=1e-4)
