"""`nanovllm bench` and `nanovllm profile`: how fast this machine runs a model, beside what its memory and arithmetic allow."""
