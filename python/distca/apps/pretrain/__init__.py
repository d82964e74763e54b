"""Parts of `pretrain_llama.py`: pretraining on Megatron-core with distca's attention."""
