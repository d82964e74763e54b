"""Weights of models: random ones that depend on the seed and on names alone, and those of a checkpoint's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers
from transformers import PreTrainedModel

from distca.apps.common.options import ConfigError
from distca.apps.train.config import TrainConfig
from distca.apps.train.model import with_weights
from distca.apps.train.stages import check_can_be_cut, keep
from support.models import FAMILIES, SIZES
from support.train_runs import one_rank

TRAINED = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "gpt_oss"]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_rank():
        yield


def _shape(name: str) -> transformers.PreTrainedConfig:
    family = FAMILIES[name]
    return getattr(transformers, family.config)(**(SIZES | family.options))


def _made(
    shape: transformers.PreTrainedConfig,
    seed: int = 0,
    checkpoint: Path | None = None,
    cut: Callable[[PreTrainedModel], None] = lambda model: None,
) -> PreTrainedModel:
    return with_weights(TrainConfig(seed=seed), shape, checkpoint, cut)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and attributes that are tensors, by name."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return {key: value.detach() for key, value in found.items()}


def _is_random(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 1 and tensor.unique().numel() > tensor.numel() // 2


@pytest.mark.parametrize("name", FAMILIES)
def test_random_weights_have_the_constants_and_the_spread_of_transformers_own(name: str) -> None:
    torch.manual_seed(1)
    theirs = _tensors(transformers.AutoModelForCausalLM.from_config(_shape(name), attn_implementation="eager"))
    torch.manual_seed(2)
    again = _tensors(transformers.AutoModelForCausalLM.from_config(_shape(name), attn_implementation="eager"))
    ours = _tensors(_made(_shape(name)))
    assert ours.keys() == theirs.keys() and len(ours) > 10
    num_random = 0
    for key, tensor in ours.items():
        assert tensor.device.type == "cpu" and tensor.dtype == theirs[key].dtype, key
        if torch.equal(theirs[key], again[key]):  # no chance in it: norms, biases, rotary frequencies
            assert torch.equal(tensor, theirs[key]), key
        elif tensor.numel() >= 256:
            num_random += 1
            # The deviation of n numbers is known to 1 / sqrt(2 n) of it: this is more than six times that.
            near = pytest.approx(theirs[key].std().item(), rel=7 * tensor.numel() ** -0.5)
            assert tensor.std().item() == near, key
            assert abs(tensor.mean().item()) < 7 * theirs[key].std().item() * tensor.numel() ** -0.5, key
    assert num_random >= 8


def test_random_weights_depend_on_the_seed_and_differ_between_modules() -> None:
    one, same, other = (_tensors(_made(_shape("llama"), seed)) for seed in (0, 0, 1))
    random = [key for key, tensor in one.items() if _is_random(tensor) and "weight" in key]
    assert len(random) == 2 + 2 * 7
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in random)
    flat = {key: tuple(one[key].flatten()[:8].tolist()) for key in random}
    assert len(set(flat.values())) == len(random), "two modules have the same numbers"


@dataclass(frozen=True)
class Stage:
    layers: tuple[int, ...]
    first: bool
    last: bool

    def cut(self, model: PreTrainedModel) -> None:
        keep(model, self.layers, first=self.first, last=self.last)


STAGES = [Stage((0,), True, False), Stage((1,), False, True)]


@pytest.mark.parametrize("stage", STAGES, ids=["first", "last"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_stage_has_the_random_weights_of_the_whole_model_and_no_other(name: str, stage: Stage) -> None:
    whole, ours = _tensors(_made(_shape(name))), _tensors(_made(_shape(name), cut=stage.cut))
    tied = _shape(name).tie_word_embeddings
    wanted = {key for key in whole if f"layers.{stage.layers[0]}." in key or "rotary" in key}
    wanted |= {key for key in whole if "embed_tokens" in key} if stage.first or tied else set()
    wanted |= {key for key in whole if key in ("model.norm.weight", "lm_head.weight")} if stage.last else set()
    assert set(ours) == wanted | ({"lm_head.weight"} & set(ours) if tied and stage.last else set())
    for key, tensor in ours.items():
        of_whole = whole.get(key, whole["model.embed_tokens.weight"])  # tied ones have one name in the whole model
        assert torch.equal(tensor, of_whole), key


# ---- checkpoints


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of tensors whose values are read from files of safetensors."""
    names: list[str] = []
    open_file = safetensors.safe_open

    class Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self._name, self._inner = name, inner

        def __getitem__(self, index: Any) -> Any:
            names.append(self._name)
            return self._inner[index]

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._inner = open_file(*args, **options)

        def __enter__(self) -> Any:
            self._inner.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._inner.__exit__(*error)

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self._inner.get_slice(name))

        def get_tensor(self, name: str) -> torch.Tensor:
            names.append(name)
            return self._inner.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", File)
    return names


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stage", STAGES, ids=["first", "last"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_stage_loads_its_own_tensors_of_a_checkpoint_and_reads_no_other(
    name: str, stage: Stage, shards: int, tmp_path: Path, read: list[str]
) -> None:
    torch.manual_seed(3)
    saved = transformers.AutoModelForCausalLM.from_config(_shape(name))
    size = sum(one.numel() * 4 for one in saved.parameters())
    saved.save_pretrained(tmp_path, max_shard_size=size // (shards - 1) if shards > 1 else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    ours = dict(_made(_shape(name), checkpoint=tmp_path, cut=stage.cut).named_parameters())
    whole = dict(saved.named_parameters(remove_duplicate=False))
    assert ours and all(torch.equal(tensor, whole[key]) for key, tensor in ours.items())
    other = STAGES[1 - STAGES.index(stage)].layers[0]
    assert read and not [key for key in read if f"layers.{other}." in key]
    assert not [key for key in read if not stage.last and (key == "lm_head.weight" or key == "model.norm.weight")]
    assert stage.first or saved.config.tie_word_embeddings or "model.embed_tokens.weight" not in read


def test_experts_of_mixtral_have_other_names_in_a_checkpoint(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(_shape("mixtral")).save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    modules = {name for name, _ in _made(_shape("mixtral")).named_parameters()}
    assert names - modules and modules - names, (
        "the test of loading Mixtral would prove nothing more than that of Llama"
    )


# ---- what cannot be cut


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TRAINED])
def test_a_model_is_either_cut_or_refused_with_the_reason(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(_shape(name), attn_implementation="distca")
    cannot = {"gemma4 with full layers of other heads", "granite", "gpt_bigcode", "gpt_neox", "gpt2"}
    if name in cannot:
        with pytest.raises(ConfigError, match=f"--pipeline: {type(model).__name__} cannot be cut into stages"):
            check_can_be_cut(model, "--pipeline")
    else:
        check_can_be_cut(model, "--pipeline")
