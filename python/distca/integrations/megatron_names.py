"""All that distca uses of Megatron-core, by name, and the versions that have it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from distca.errors import DistcaError

#: The first version that the tests have run with, and the first that they have not.
_FIRST, _END = (0, 16), (0, 20)
REQUIREMENT = "megatron-core>={}.{},<{}.{}".format(*_FIRST, *_END)


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
            f"install {REQUIREMENT}"
        ) from error


def _check_version(version: tuple[Any, ...]) -> None:
    """Raises DistcaError for a version that was not tried."""
    if not _FIRST <= version[:2] < _END:
        raise DistcaError(
            f"distca.integrations.megatron uses parts of Megatron-core that change between versions: version "
            f"{'.'.join(map(str, version[:3]))} was not tried. What to change: install {REQUIREMENT}"
        )


_check_version(_name("package_info", "VERSION"))

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
TransformerBlock = _name("transformer.transformer_block", "TransformerBlock")
gather_rows = _name("tensor_parallel", "gather_from_sequence_parallel_region")
P2PCommunicator = _name("pipeline_parallel.p2p_communication", "P2PCommunicator")

# Parts of Megatron's own schedules, which no version promises to keep.
forward_step = _name("pipeline_parallel.schedules", "forward_step")
check_first_val_step = _name("pipeline_parallel.schedules", "check_first_val_step")
deallocate_output_tensor = _name("pipeline_parallel.schedules", "deallocate_output_tensor")
get_tensor_shapes = _name("pipeline_parallel.schedules", "get_tensor_shapes")
_backward_step = _name("pipeline_parallel.schedules", "backward_step")
_get_model_type = _name("pipeline_parallel.schedules", "get_model_type")

_tensor_parallel: Any = importlib.import_module("megatron.core.tensor_parallel")


class _NoForks:
    """Stands for Megatron's tracker of random numbers where none are drawn."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def taking_turns(checkpoint: Any) -> Iterator[None]:
    """In `with`, two calls of a block of layers may take turns in one thread.

    Forks of the tracker of random numbers must nest, and therefore there are none. `checkpoint` takes the place of
    Megatron's ``checkpoint(function, distribute_saved_activations, *args)``.
    """
    replaced = {"checkpoint": checkpoint, "get_cuda_rng_tracker": _NoForks}
    before = {name: _name("tensor_parallel", name) for name in replaced}
    vars(_tensor_parallel).update(replaced)
    try:
        yield
    finally:
        vars(_tensor_parallel).update(before)


def backward_step(model: Any, *given: Any, config: Any) -> Any:
    """Megatron's backward_step, whose arguments are those of 0.17. In 0.16 it also takes the kind of the model."""
    takes_type = "model_type" in inspect.signature(_backward_step).parameters
    kind = {"model_type": _get_model_type(model)} if takes_type else {}
    return _backward_step(*given, config=config, **kind)
