"""`distca train` with given models, tokenizers and JSON lines, all from local files."""

import io
import itertools
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer as TokenizerFile
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import distca
from distca.apps.cli import main
from distca.apps.common.corpus import read_corpus
from distca.apps.common.options import ConfigError
from distca.apps.common.sources import DataError
from distca.apps.common.tokens import Tokenizer
from distca.apps.train.checkpoint import whole_checkpoints
from distca.apps.train.cli import train_rank
from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batches
from distca.apps.train.log import create_run_dir
from distca.apps.train.model import build_model, check_positions, model_config, with_weights, wrap
from distca.apps.train.resume import resumed_config
from distca.apps.train.stages import keep
from distca.apps.train.trainer import train
from distca.integrations.hf import heads_of, windows_of
from support.ranks import launch
from support.train_runs import metrics_in, one_rank

WORDS = [f"word{number}" for number in range(30)]
WINDOW = 12
GEMMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


PHI3 = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 70,
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 70,
    },
}


QWEN3_NEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0, 1],
    "pad_token_id": None,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words, JSON lines of such words, and a Gemma 3 with alternating windows and tied embeddings."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = TokenizerFile(WordLevel({word: index for index, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    lines = [json.dumps({"text": " ".join(WORDS[i % 30] for i in range(n, 4 * n))}) for n in (30, 2, 9, 5, 17, 1)]
    lines += ["{", '{"text": 3}', "[]", '{"text": "\\ud800"}', '{"text": ""}']
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    torch.manual_seed(11)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA))
    model.save_pretrained(folder / "gemma")
    (folder / "shape").mkdir()
    shutil.copy(folder / "gemma" / "config.json", folder / "shape")
    return folder


def _config(files: Path, **options: object) -> TrainConfig:
    base = TrainConfig(steps=2, tokens_per_rank=64, data=files / "data.jsonl", tokenizer=files / "tokenizer")
    return replace(base, **{"model": str(files / "gemma"), **options})


def _losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in metrics_in(run_dir)]


def test_lines_without_a_text_are_skipped_and_counted(files: Path, tmp_path: Path) -> None:
    corpus = read_corpus(files / "data.jsonl", 1.0)
    assert (len(corpus), corpus.num_skipped, corpus.unit) == (6, 4, "lines")
    assert bytes(corpus.document(5).tolist()) == b"word1 word2 word3"
    (tmp_path / "bad.jsonl").write_text("{}\n1\n")
    with pytest.raises(DataError, match="holds no text: 2 lines, of which 2 are not JSON objects with a text"):
        read_corpus(tmp_path / "bad.jsonl", 1.0)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer/tokenizer.json"])
def test_a_tokenizer_makes_the_tokens_of_which_the_start_is_kept(name: str, files: Path) -> None:
    tokenizer = Tokenizer(files / name)
    assert tokenizer.vocabulary == 31
    corpus = read_corpus(files / "data.jsonl", 0.5, tokenizer)
    assert corpus.lengths() == [45, 3, 14, 8, 26, 2]
    assert corpus.document(1).tolist() == [2, 3, 4]
    whole = read_corpus(files / "data.jsonl", 1.0, tokenizer)
    assert whole.fingerprint != corpus.fingerprint


def test_windows_and_heads_come_from_the_configuration(files: Path) -> None:
    shape, checkpoint = model_config(_config(files), 31)
    assert checkpoint == files / "gemma"
    assert windows_of(shape) == [WINDOW, None, WINDOW]
    assert heads_of(shape, torch.float32) == distca.Heads(q=4, kv=2, dim=16)
    shape, checkpoint = model_config(_config(files, model=str(files / "shape"), layers=2), 31)
    assert (checkpoint, windows_of(shape)) == (None, [WINDOW, None])
    shape, _ = model_config(TrainConfig(model="llama-8b", layers=3), 256)
    assert windows_of(shape) == [None] * 3
    assert heads_of(shape, torch.bfloat16) == distca.Heads(q=32, kv=8, dim=128, dtype=torch.bfloat16)
    assert windows_of(transformers.MistralConfig(num_hidden_layers=2, sliding_window=7)) == [7, 7]
    kinds = ["chunked_attention", "full_attention"]
    chunked = transformers.Llama4TextConfig(num_hidden_layers=2, layer_types=kinds, attention_chunk_size=64)
    assert windows_of(chunked) == [distca.Chunk(64), None]
    hybrid = transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    assert windows_of(hybrid) == [None], "that of the layer with attention"
    with pytest.raises(distca.InvalidArgumentError, match="layer 0 of the model is of type indexed_attention"):
        windows_of(transformers.LlamaConfig(num_hidden_layers=1, layer_types=["indexed_attention"]))
    with pytest.raises(distca.InvalidArgumentError, match="none of the model's layers has attention; .* conv"):
        windows_of(transformers.Lfm2Config(num_hidden_layers=1, layer_types=["conv"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "meta-llama/Llama-3.1-8B"}, "--model is meta-llama/Llama-3.1-8B, must be one of llama-8b, a config"),
        ({"model": "FILES/tokenizer"}, "must be one of llama-8b, a config.json, or a folder with one; nothing is"),
        ({"model": "FILES/tokenizer/tokenizer.json"}, "whose config.json transformers cannot read"),
        ({"tokenizer": Path("gpt2")}, "--tokenizer is gpt2, must be a local folder or tokenizer.json"),
        ({"tokenizer": None}, "whose vocabulary of 64 is too small for bytes, the default tokens (256)"),
        ({"layers": 4}, "--layers is 4, must be at most the model's 3"),
        ({"hidden": 32}, "--hidden is 32, must be left out with --model"),
    ],
)
def test_a_model_or_tokenizer_that_cannot_be_used_is_an_error_that_says_why(
    options: dict, message: str, files: Path
) -> None:
    if "model" in options:
        options = {"model": options["model"].replace("FILES", str(files))}
    with pytest.raises(ConfigError, match=re.escape(message)):
        config = _config(files, **options)
        tokenizer = Tokenizer(config.tokenizer) if config.tokenizer is not None else None
        model_config(config, tokenizer.vocabulary if tokenizer is not None else 256)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama", "hidden_size": "x"}, "Field 'hidden_size' expected int, got str"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "whose num_hidden_layers is 0, must be at least 1"),
        ({"model_type": "llama", "num_attention_heads": 0}, "config.json transformers cannot read: integer division"),
        ({"model_type": ["llama"]}, "config.json transformers cannot read: unhashable type"),
        ({"model_type": "vit"}, "a vit, which is not a language model"),
    ],
)
def test_a_configuration_of_no_model_is_an_error_of_one_line(values: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        model_config(TrainConfig(model=str(tmp_path)), 256)
    assert "\n" not in str(raised.value)


@pytest.fixture
def checkpoint(files: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of Gemma, which a test may damage."""
    return shutil.copytree(files / "gemma", tmp_path / "gemma")


def test_a_checkpoint_without_all_weights_of_its_model_is_refused(files: Path, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    assert "lm_head.weight" not in weights, "a tied weight is none that lacks"
    up, down = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (1, 2))
    lacking = {name: weight for name, weight in weights.items() if name not in (up, down)}
    for damaged, message in [
        (lacking, f"whose checkpoint lacks weights: {up} and 1 more; restore its files"),
        (weights | {up: torch.zeros(3, 5)}, f"weights of other shapes: {up}, of shape (3, 5) instead of (32, 48);"),
    ]:
        safetensors.torch.save_file(damaged, file, metadata={"format": "pt"})
        with one_rank(), pytest.raises(ConfigError, match=re.escape(message)):
            build_model(_config(files, model=str(checkpoint)), 31)
    file.write_bytes(b"no weights")
    with one_rank(), pytest.raises(ConfigError, match="whose weights are damaged: .*; restore its files"):
        build_model(_config(files, model=str(checkpoint)), 31)


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16", "master_weights": True}])
def test_weights_of_float32_are_not_rounded_where_the_checkpoint_names_another_dtype(
    options: dict, files: Path, checkpoint: Path
) -> None:
    values = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    with one_rank():
        made = build_model(_config(files, model=str(checkpoint), **options), 31).state_dict()
    for name, weight in safetensors.torch.load_file(checkpoint / "model.safetensors").items():
        assert made[name].dtype == torch.float32 and torch.equal(made[name], weight), name


def test_a_stage_is_silent_on_the_weights_that_other_stages_have(files: Path) -> None:
    config = _config(files)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    transformers.logging.add_handler(handler)
    try:
        with one_rank():
            shape, checkpoint = model_config(config, 31)
            model = with_weights(config, shape, checkpoint, lambda whole: keep(whole, [0], first=True, last=False))
    finally:
        transformers.logging.remove_handler(handler)
    assert "model.layers.0.mlp.up_proj.weight" in model.state_dict()
    assert "model.layers.1.mlp.up_proj.weight" not in model.state_dict()
    assert said.getvalue() == ""


def test_a_document_longer_than_the_models_positions_is_an_error(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(files, tokens_per_rank=300)
    shape, _ = model_config(config, 31)
    check_positions(shape, config, longest_document=256)
    check_positions(shape, _config(files), longest_document=5000)  # a step holds only a part of such a document
    check_positions(shape, replace(config, tokens_per_rank=256, homes="whole"), longest_document=5000)
    with pytest.raises(ConfigError, match="made for 256 positions, but a step may hold 257 tokens of a document"):
        check_positions(shape, config, longest_document=257)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "long.txt").write_text("word1 " * 300)
    options = ["--model", str(config.model), "--tokenizer", str(config.tokenizer), "--data", str(tmp_path / "data")]
    assert main(["train", *options, "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "may hold 300 tokens of a document" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()  # no rank was started


def _first_loss_of_transformers(config: TrainConfig) -> float:
    """The first step's mean loss by transformers' own attention, document by document."""
    assert config.model is not None and config.tokenizer is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model, attn_implementation="sdpa").train()
    corpus = read_corpus(config.data, 1.0, Tokenizer(config.tokenizer))
    batch = next(iter(Batches(corpus, rank=0, ranks=1, tokens_per_rank=128, steps=1, seed=config.seed)))
    total, row = 0.0, 0
    for _, begin, end in batch.layout.segments(0):
        rows = slice(row, row + end - begin)
        logits = model(batch.input_ids[:, rows], use_cache=False).logits[0]
        total += F.cross_entropy(logits, batch.labels[0, rows], reduction="sum").item()
        row = rows.stop
    return total / batch.num_targets


def test_a_checkpoint_with_longrope_has_the_losses_of_one_packed_row_on_one_and_on_two_ranks(
    files: Path, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**PHI3))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:  # gain 1.5: nearly uniform attention hides wrong positions
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "phi3")
    two = _config(files, model=str(tmp_path / "phi3"), runs_dir=tmp_path, name="two")
    one = replace(two, name="one", ranks=1, tokens_per_rank=128)
    two_dir, one_dir = create_run_dir(two), create_run_dir(one)
    launch(train_rank, two, two_dir, ranks=2)
    with one_rank():
        train(one, one_dir)
    corpus = read_corpus(two.data, 1.0, Tokenizer(two.tokenizer))
    batch = next(iter(Batches(corpus, rank=0, ranks=1, tokens_per_rank=128, steps=1, seed=two.seed)))
    positions = batch.layout.position_ids(0)[None]
    longest = sorted(rank.max().item() for rank in positions[0].split(64))
    assert longest[0] < 70 < longest[1], "of its rows alone, one rank would take other frequencies than the other"
    logits = model.train()(batch.input_ids, position_ids=positions, use_cache=False).logits[0]
    expected = F.cross_entropy(logits, batch.labels[0], reduction="sum").item() / batch.num_targets
    assert _losses(one_dir)[0] == pytest.approx(expected, rel=1e-5)
    assert _losses(two_dir) == pytest.approx(_losses(one_dir), rel=1e-5)


def test_a_checkpoint_of_alternating_windows_trains_resumes_and_is_the_same_on_two_ranks(
    files: Path, tmp_path: Path
) -> None:
    two = _config(files, runs_dir=tmp_path, name="two", compare=True)
    one = replace(two, name="one", ranks=1, tokens_per_rank=128, checkpoint_every=1, compare=False)
    two_dir, one_dir = create_run_dir(two), create_run_dir(one)
    launch(train_rank, two, two_dir, ranks=2)
    with one_rank():
        train(one, one_dir)
    losses = _losses(one_dir)
    assert losses[0] == pytest.approx(_first_loss_of_transformers(two), rel=1e-5)
    assert _losses(two_dir) == pytest.approx(losses, rel=1e-5)
    shutil.rmtree(whole_checkpoints(one_dir)[2])
    with one_rank():
        train(resumed_config(one_dir, {}), one_dir)
    assert _losses(one_dir) == losses
    assert json.loads((one_dir / "summary.json").read_text())["lines_skipped"] == 4


def test_a_model_with_recurrent_layers_trains_where_documents_are_whole_and_where_they_are_cut(
    files: Path, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**QWEN3_NEXT)).train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "hybrid")
    two = _config(files, model=str(tmp_path / "hybrid"), homes="whole", runs_dir=tmp_path, name="two")
    one = replace(two, name="one", ranks=1, accumulate=2)
    more = replace(two, name="more", fsdp=True, checkpoint_activations=True, compare=True)
    one_dir = create_run_dir(one)
    with one_rank():
        train(one, one_dir)
    for config in (two, more):
        run_dir = create_run_dir(config)
        launch(train_rank, config, run_dir, ranks=2)
        assert _losses(run_dir) == pytest.approx(_losses(one_dir), rel=1e-5)
    # A step's documents are cut where a rank is full, and at no other place.
    corpus = read_corpus(two.data, 1.0, Tokenizer(two.tokenizer))
    [batch] = Batches(corpus, rank=0, ranks=1, tokens_per_rank=128, steps=1, seed=two.seed)
    ends = itertools.accumulate(end - begin for _, begin, end in batch.layout.segments(0))
    expected = 0.0
    for begin, end in itertools.pairwise(sorted({0, 64, *ends})):
        logits = model(batch.input_ids[:, begin:end], use_cache=False).logits[0]
        expected += F.cross_entropy(logits, batch.labels[0, begin:end], reduction="sum").item()
    assert _losses(one_dir)[0] == pytest.approx(expected / batch.num_targets, rel=1e-5)
    # Documents that are cut between ranks come together for the recurrent layers.
    cut = replace(two, homes="head-tail", name="cut", ranks=3, tokens_per_rank=40, checkpoint_activations=True)
    alone = replace(cut, ranks=1, tokens_per_rank=120, name="not cut")
    cut_dir, alone_dir = create_run_dir(cut), create_run_dir(alone)
    launch(train_rank, cut, cut_dir, ranks=3)
    with one_rank():
        train(alone, alone_dir)
    assert _losses(cut_dir) == pytest.approx(_losses(alone_dir), rel=1e-5)


def test_layers_that_share_weights_cannot_be_sharded_one_by_one(tmp_path: Path) -> None:
    config = TrainConfig(hidden=32, layers=3, tokens_per_rank=64, fsdp=True)
    with one_rank():
        model = build_model(config, 64)
        layers = model.model.layers
        layers[2].self_attn.q_proj = layers[0].self_attn.q_proj
        with pytest.raises(ConfigError, match=r"--fsdp .* layers 0 and 2 of .* share the weight self_attn.q_proj.weig"):
            wrap(model, config)
