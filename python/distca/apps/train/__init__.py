"""`distca train`: trains a language model, by default a tiny Llama, with core attention disaggregation on CPU ranks."""
