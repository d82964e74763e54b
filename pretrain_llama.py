"""Pretrains Llama, Qwen3 or a tiny model on Megatron-core, with attention balanced over all ranks by distca.

`python pretrain_llama.py --help` lists the options. `pretrain_llama.sh` starts it, also under Slurm.
"""

import sys

from distca.apps.pretrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
