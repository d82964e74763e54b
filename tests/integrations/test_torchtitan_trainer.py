"""torchtitan's Trainer, with FSDP and tensor parallelism: distca changes neither losses nor gradients."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import distca
from support.ranks import launch

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make titan", allow_module_level=True)

from torchtitan.config import ConfigManager
from torchtitan.config.override import derive
from torchtitan.trainer import Trainer

from distca.integrations.torchtitan_trainer import DistcaConfig, DistcaTrainer, with_distca
from support import titan_on_cpu


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_a_job_has_the_losses_and_gradients_of_torchtitans_own_attention(tensor_ranks: int) -> None:
    own, ours = (
        launch(titan_on_cpu.trained, use_distca, tensor_ranks, ranks=2 * tensor_ranks) for use_distca in (False, True)
    )
    for rank, (expected, run) in enumerate(zip(own, ours, strict=True)):
        assert len(run.losses) == 2 * titan_on_cpu.STEPS
        assert run.losses == pytest.approx(expected.losses, rel=1e-6), rank
        # Of six layers: forward and backward, because selective checkpointing saves attention; forward in validation.
        assert run.attention_steps == 6 * 3 * titan_on_cpu.STEPS
        assert run.grads.keys() == expected.grads.keys()
        for name, wanted in expected.grads.items():
            assert (run.grads[name] - wanted).abs().max() <= 1e-4 * wanted.abs().max(), (rank, name)


def _set(path: str, value: Any) -> Any:
    def change(config: Any) -> None:
        part, name = path.split(".")
        setattr(getattr(config, part), name, value)

    return change


REFUSED = {
    "a pipeline": (_set("parallelism.pipeline_parallel_degree", 2), "pipeline_parallel_degree > 1"),
    "context parallelism": (_set("parallelism.context_parallel_degree", 2), "context_parallel_degree > 1"),
    "types of meshes": (_set("debug.spmd_typechecking", True), "spmd_typechecking"),
    "flex attention": (
        lambda config: setattr(config, "model_spec", titan_on_cpu.model_registry("debugmodel", attn_backend="flex")),
        'attn_backend="varlen"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_is_not_supported_is_refused_before_it_starts(name: str) -> None:
    change, message = REFUSED[name]
    config = titan_on_cpu.job(1, 1)
    change(config)
    with pytest.raises(distca.InvalidArgumentError, match=f"^torchtitan: .*{message}"):
        with_distca(config)


class Logging(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


class LoggingDistca(DistcaTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(DistcaTrainer.Config):
        every: int = 1


@dataclass(kw_only=True, slots=True)
class PlainConfig(Trainer.Config):
    every: int = 1


def test_a_trainer_of_a_users_own_is_kept_or_refused() -> None:
    job = titan_on_cpu.job(1, 1)
    with pytest.raises(distca.InvalidArgumentError, match=r"trainer is .*\.Logging, .*: derive it and its Config from"):
        with_distca(derive(job, Logging.Config))
    made = with_distca(derive(job, LoggingDistca.Config, every=3), timeout=30.0)
    assert isinstance(made, LoggingDistca.Config) and made.every == 3 and made.distca.timeout == 30.0
    assert type(with_distca(derive(titan_on_cpu.job(1, 1), PlainConfig))) is DistcaTrainer.Config


def test_options_that_a_job_has_stay_and_the_job_is_not_changed() -> None:
    job = derive(titan_on_cpu.job(1, 1), LoggingDistca.Config, distca=DistcaConfig(tolerance=0.005, dtype="float32"))
    job.training.disable_cuda_graphs = False
    made = with_distca(job, timeout=30.0)
    assert made.distca == DistcaConfig(tolerance=0.005, dtype="float32", timeout=30.0)
    assert (job.distca.timeout, job.override.imports, job.training.disable_cuda_graphs) == (600.0, [], False)
    assert with_distca(made) == made


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "fp32"), ("reduce_dtype", "half16"), ("reduce_dtype", "float16")]
)
def test_a_dtype_that_no_plan_has_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=f"distca.{name} is '{value}'; float32, .* are allowed"):
        with_distca(titan_on_cpu.job(1, 1), **{name: value})


def test_cuda_graphs_that_are_turned_on_again_are_refused() -> None:
    config = with_distca(titan_on_cpu.job(1, 1))
    config.training.disable_cuda_graphs = False
    with pytest.raises(distca.InvalidArgumentError, match="CUDA graphs; set training.disable_cuda_graphs"):
        config.build()


def test_the_command_line_finds_a_job_and_sets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job_of_a_user").mkdir()
    (tmp_path / "job_of_a_user" / "__init__.py").touch()
    (tmp_path / "job_of_a_user" / "config_registry.py").write_text(
        "from distca.integrations.torchtitan_trainer import with_distca\n"
        "from support.titan_on_cpu import job\n"
        "def debug():\n"
        "    return with_distca(job(1, 1), timeout=30.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--module", "job_of_a_user", "--config", "debug", "--distca.tolerance", "0.02"]
    arguments += ["--distca.reduce_dtype", "bfloat16"]
    config = ConfigManager().parse_args(arguments)
    assert isinstance(config, DistcaTrainer.Config)
    assert config.distca == DistcaConfig(tolerance=0.02, reduce_dtype="bfloat16", timeout=30.0)
    assert config.training.disable_cuda_graphs
