"""The faults that planted_faults.py plants, each with the tests that should notice it."""

from faults import (
    attention,
    emulated_gpu,
    megatron,
    pipelines,
    plans,
    pretraining,
    recording,
    retained,
    simulate,
    split_runs,
    steps,
    tcp,
    titan,
    torch_pipelines,
    training,
    watching,
)

FAULTS = [
    *split_runs.FAULTS,
    *steps.FAULTS,
    *plans.FAULTS,
    *pipelines.FAULTS,
    *torch_pipelines.FAULTS,
    *megatron.FAULTS,
    *pretraining.FAULTS,
    *recording.FAULTS,
    *retained.FAULTS,
    *attention.FAULTS,
    *training.FAULTS,
    *watching.FAULTS,
    *tcp.FAULTS,
    *titan.FAULTS,
    *simulate.FAULTS,
    *emulated_gpu.FAULTS,
]
