"""`distca train`: a tiny Llama trained with core attention disaggregation on CPU ranks."""
