# distca with Megatron-core, built for compute capabilities 9.0 to 12.0. Not built yet: see docs/install.md.
#
#   docker build -t distca .
#   docker run --gpus all --ulimit memlock=-1 distca bash pretrain_llama.sh
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      g++ git make python3 python3-dev python3-venv rdma-core libibverbs1 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH PYTHON=/venv/bin/python
RUN pip install --no-cache-dir torch==2.13.0
COPY . /distca
WORKDIR /distca
# PyTorch's wheel brings NVSHMEM. CUTLASS has headers alone.
RUN pip install --no-cache-dir --no-deps nvidia-cutlass==4.2.0.0 'megatron-core>=0.16,<0.20' \
    && DISTCA_CUDA=1 pip install --no-cache-dir '.[train,ping-pong]' && distca doctor
