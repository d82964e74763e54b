"""The faults that planted_faults.py plants, each with the tests that should notice it."""

from faults import attention, plans, recording, retained, steps, tcp, training, watching

FAULTS = [
    *steps.FAULTS,
    *plans.FAULTS,
    *recording.FAULTS,
    *retained.FAULTS,
    *attention.FAULTS,
    *tcp.FAULTS,
    *training.FAULTS,
    *watching.FAULTS,
]
