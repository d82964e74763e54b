"""All that distca uses of Megatron-core, by name, in one place."""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

from distca.errors import DistcaError


def _name(module: str, name: str) -> Any:
    """A name of a module of Megatron-core. Raises DistcaError, which says the version, if it is missing."""
    core: Any = None
    try:
        core = importlib.import_module("megatron.core")
        return attrgetter(name)(importlib.import_module(f"megatron.core.{module}"))
    except (ImportError, AttributeError) as error:
        version = "Megatron-core is not installed" if core is None else f"Megatron-core {core.__version__}"
        raise DistcaError(
            f"distca.integrations.megatron uses {name} of megatron.core.{module}: {version} ({error}). What to change: "
            "have megatron-core 0.16"
        ) from error


AttnMaskType = _name("transformer.enums", "AttnMaskType")
MegatronModule = _name("transformer.module", "MegatronModule")
PackedSeqParams = _name("packed_seq_params", "PackedSeqParams")
get_model_config = _name("utils", "get_model_config")
make_viewless_tensor = _name("utils", "make_viewless_tensor")
is_layer_window_attention = _name("transformer.utils", "is_layer_window_attention")
get_num_layers_to_build = _name("transformer.transformer_block", "get_num_layers_to_build")
tensor_group = _name("parallel_state", "get_tensor_model_parallel_group")
pipeline_group = _name("parallel_state", "get_pipeline_model_parallel_group")
context_parallel_group = _name("parallel_state", "get_context_parallel_group")
P2PCommunicator = _name("pipeline_parallel.p2p_communication", "P2PCommunicator")

# Parts of Megatron's own schedules, which no version promises to keep.
forward_step = _name("pipeline_parallel.schedules", "forward_step")
backward_step = _name("pipeline_parallel.schedules", "backward_step")
check_first_val_step = _name("pipeline_parallel.schedules", "check_first_val_step")
deallocate_output_tensor = _name("pipeline_parallel.schedules", "deallocate_output_tensor")
get_model_type = _name("pipeline_parallel.schedules", "get_model_type")
get_tensor_shapes = _name("pipeline_parallel.schedules", "get_tensor_shapes")
