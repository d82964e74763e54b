"""What `pretrain_llama.py` does on one rank."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel

from distca.apps.common.stopping import stop_request
from distca.apps.pretrain.compare import compare
from distca.apps.pretrain.options import Options
from distca.apps.pretrain.run import Run


def train(options: Options, run_dir: Path) -> bool:
    """Trains, or compares. `torch.distributed` must be initialised, with gloo for tensors on the CPU.

    Args:
        options: resolved options.
        run_dir: the folder of the run, which exists.

    Returns:
        Whether it was stopped before the last step.

    Raises:
        DistcaError: the options, the documents or a checkpoint are not as they must be; or a rank failed.
    """
    cuda = torch.cuda.is_available()
    with ExitStack() as stack:
        if not cuda:
            from distca.integrations.megatron_on_cpu import cuda_is_cpu

            stack.enter_context(cuda_is_cpu())
        stop = stack.enter_context(stop_request())
        parallel_state.initialize_model_parallel(
            options.tp_size, options.pp_size, options.vpp_size if options.vpp_size > 1 else None
        )
        stack.callback(parallel_state.destroy_model_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(options.seed + 1)
        if options.compare:
            compare(options, run_dir, cuda=cuda)
            return False
        return stack.enter_context(closing(Run(options, run_dir, cuda=cuda))).all_steps(stop)
