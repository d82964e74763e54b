"""The code for GPUs, run on a host: the machine of sm_90a, and the CUDA runtime."""
