"""torchtitan's Trainer on CPU ranks. It asks for an accelerator; what it asks is answered here for the CPU."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torchtitan.tools.utils as accelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_CPU = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
    get_device_name=lambda *_: "cpu",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=2**34),
    memory_stats=lambda *_: {},
    reset_peak_memory_stats=lambda *_: None,
    empty_cache=lambda *_: None,
)
_CPU.set_device, _CPU.device_count = lambda _: None, lambda: 1
accelerator.device_type, accelerator.device_module = "cpu", _CPU  # before the modules that copy these names

import torchtitan.distributed.utils as titan_distributed  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry, model_registry  # noqa: E402

import distca  # noqa: E402
from distca.integrations.torchtitan_trainer import DistcaTrainer, with_distca  # noqa: E402
from support import titan  # noqa: E402

STEPS, ROWS = 2, 2 * titan.ROWS


class NoTokenizer(BaseTokenizer):
    """What a job has whose data are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


class Batches(BaseDataLoader):
    """Random tokens in documents of `titan.LENGTHS`, dealt to the data ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        of_rank = ROWS // dp_world_size
        self.rows = slice(of_rank * dp_rank, of_rank * (dp_rank + 1))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(11)
        positions = torch.cat([titan.positions_of(rank) for rank in range(2)])[self.rows]
        while True:
            tokens, labels = torch.randint(0, 2000, (2, ROWS, titan.COLUMNS), generator=generator)[:, self.rows]
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Run(NamedTuple):
    """Losses of training and of validation after each step, the last gradients, and the steps of attention."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    attention_steps: int


def job(data_ranks: int, tensor_ranks: int) -> Any:
    """The configuration of torchtitan's debug job, with varlen attention, on the CPU."""
    config = config_registry.llama3_debugmodel_varlen_attn()
    config.model_spec = model_registry("debugmodel", attn_backend="varlen")
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Batches.Config()
    config.validator.enable, config.validator.dataloader = True, Batches.Config()
    config.validator.freq, config.validator.steps = 1, 1
    config.training.seq_len, config.training.local_batch_size = titan.COLUMNS, ROWS // data_ranks
    config.training.steps, config.training.mixed_precision_param = STEPS, "float32"
    config.parallelism.tensor_parallel_degree = tensor_ranks
    config.parallelism.spmd_backend = "partial_dtensor"  # "spmd_types" needs a PyTorch after 2.13
    config.dump_folder, config.debug.seed = tempfile.mkdtemp(), 7
    return config


def _own_attention(self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **keywords: Any) -> torch.Tensor:
    return titan._own_attention(self.window_size, q_BLNH, k_BLNH, v_BLNH, **keywords)


def trained(use_distca: bool, tensor_ranks: int = 1) -> Run:
    """A rank of a job that trains for some steps and validates."""
    os.environ["LOCAL_RANK"] = "0"
    config = job(dist.get_world_size() // tensor_ranks, tensor_ranks)
    if use_distca:
        config = with_distca(config, dtype="float32", timeout=60.0)
    with (
        mock.patch.object(VarlenAttention, "forward", _own_attention),  # the class that distca replaces
        mock.patch.object(titan_distributed, "set_pg_timeouts", lambda *_, **__: None),  # it asks for NCCL
    ):
        run = _run(config)
    gc.collect()  # FSDP's groups, before the ranks' own is destroyed
    return run


def _run(config: Any) -> Run:
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    losses: list[float] = []
    forward_backward = trainer.fwd_bwd_fn

    def noted(*arguments: Any) -> torch.Tensor:
        loss = forward_backward(*arguments)
        losses.append(loss.item())
        return loss

    trainer.fwd_bwd_fn = noted
    trainer.metrics_processor.log_validation = lambda loss, step: losses.append(loss)
    trainer.train()
    grads = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in trainer.model_parts[0].named_parameters()
    }
    steps = trainer.distca.step if isinstance(trainer, DistcaTrainer) else 0
    trainer.close()
    assert distca.get_context() is None
    return Run(losses, grads, steps)
