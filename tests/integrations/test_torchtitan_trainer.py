"""torchtitan's Trainer, with FSDP and tensor parallelism: distca changes neither losses nor gradients."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import distca
from support.ranks import launch

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make titan", allow_module_level=True)

from distca.integrations.torchtitan_trainer import with_distca
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


def test_cuda_graphs_that_are_turned_on_again_are_refused() -> None:
    config = with_distca(titan_on_cpu.job(1, 1))
    config.training.disable_cuda_graphs = False
    with pytest.raises(distca.InvalidArgumentError, match="CUDA graphs; set training.disable_cuda_graphs"):
        config.build()
