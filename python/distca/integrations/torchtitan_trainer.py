"""torchtitan's Trainer with core attention by distca: `with_distca(config)` changes a job's configuration.

def llama3_8b_distca() -> Trainer.Config:  # in the config_registry.py of a module of yours
    config = llama3_8b()
    config.model_spec = model_registry("8B", attn_backend="varlen")
    return with_distca(config)

torchrun ... -m torchtitan.train --module your_module --config llama3_8b_distca
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torchtitan.trainer import Trainer

import distca
from distca.integrations import torchtitan
from distca.integrations.torchtitan_config import derive, refuse

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(kw_only=True, slots=True)
class DistcaConfig:
    """What `distca.init` and `distca.plan` are told: options of the command line, such as ``--distca.tolerance``."""

    dtype: str = "bfloat16"
    """What attention is computed in; torchtitan's own varlen attention computes in bfloat16."""
    tolerance: float = 0.05
    """How far the largest load may be above the mean, as a fraction of it."""
    reduce_dtype: str = "float32"
    """What contributions of several ranks to a key's gradients travel in: float32, or `dtype` with half the bytes."""
    transport: str = "auto"
    """How rows travel."""
    timeout: float = 600.0
    """Seconds after which a silent peer is an error."""


class DistcaTrainer(Trainer):
    """torchtitan's Trainer, whose data ranks compute core attention together in the context ``trainer.distca``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        distca: DistcaConfig = field(default_factory=DistcaConfig)

    def __init__(self, config: Config) -> None:
        """Makes the trainer and its context. It is collective over all ranks.

        Raises:
            InvalidArgumentError: the job uses what is not supported yet, or a layer cannot be computed by a plan.
        """
        _check_supported(config)
        options = config.distca
        super().__init__(config)
        dims = self.parallel_dims
        tensor_parallel, batch = dims.get_optional_mesh("tp"), dims.get_optional_mesh("batch")
        self.distca = distca.init(
            tensor_parallel=tensor_parallel,
            max_tokens=config.training.local_batch_size * config.training.seq_len,
            heads=torchtitan.heads_of(self.model_config, getattr(torch, options.dtype)),
            transport=options.transport,
            timeout=options.timeout,
            device=self.device,
        )
        group = None if batch is None else batch.get_group()
        torchtitan.plan_batches(
            self.model_parts[0],
            context=self.distca,
            group=group,
            tolerance=options.tolerance,
            reduce_dtype=getattr(torch, options.reduce_dtype),
        )

    def close(self) -> None:
        """Closes the trainer, then the context."""
        super().close()
        self.distca.close()


def with_distca(config: Trainer.Config, **options: Any) -> DistcaTrainer.Config:
    """The configuration of a job that uses distca: its trainer, the overrides, and no CUDA graphs.

    Args:
        config: the job's configuration. Its model has varlen attention. Its trainer is torchtitan's own, or derived
            from DistcaTrainer. It stays as it is.
        options: those of `DistcaConfig`. The others are those of the configuration, if it has them.

    Raises:
        InvalidArgumentError: the job uses what is not supported yet, or an option is wrong.
    """
    owner = type(config)._owner
    if owner is not Trainer and not issubclass(owner, DistcaTrainer):
        refuse(
            f"the job's trainer is {owner.__module__}.{owner.__qualname__}, in whose place DistcaTrainer would come: "
            "derive it and its Config from DistcaTrainer and DistcaTrainer.Config"
        )
    imports = list(config.override.imports)
    named = [each if isinstance(each, str) else each[0] for each in imports]  # others have keyword arguments
    for function in (torchtitan.use_distca, torchtitan.save_distca):
        name = f"{torchtitan.__name__}.{function.__name__}"
        imports += [name] if name not in named else []
    has_options = isinstance(config, DistcaTrainer.Config)
    made = derive(
        config,
        type(config) if has_options else DistcaTrainer.Config,
        distca=replace(config.distca if has_options else DistcaConfig(), **options),
        override=replace(config.override, imports=imports),
        training=replace(config.training, disable_cuda_graphs=True),
    )
    _check_supported(made)
    return made


def _check_supported(config: DistcaTrainer.Config) -> None:
    """Refuses, before anything is set up, what has not been made to work with distca."""
    refused = {
        "parallelism.pipeline_parallel_degree > 1": config.parallelism.pipeline_parallel_degree > 1,
        "parallelism.context_parallel_degree > 1": config.parallelism.context_parallel_degree > 1,
        "CUDA graphs; set training.disable_cuda_graphs": not config.training.disable_cuda_graphs,
        "debug.spmd_typechecking": config.debug.spmd_typechecking,
    }
    if found := [name for name, used in refused.items() if used]:
        refuse(f"not supported with distca yet: {'; '.join(found)}")
    options = config.distca
    for name, allowed in (("dtype", _DTYPES), ("reduce_dtype", ("float32", options.dtype))):
        if (found := getattr(options, name)) not in allowed:
            refuse(f"distca.{name} is {found!r}; {', '.join(dict.fromkeys(allowed))} are allowed")
    torchtitan.heads_of(config.model_spec.model)
