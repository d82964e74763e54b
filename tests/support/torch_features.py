"""What the installed PyTorch can do, as far as tests depend on it."""

from __future__ import annotations

import torch

#: Whether FSDP2 can keep the weights of a layer until both halves of a ping-pong have left it.
PING_PONG_TAKES_FSDP = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
