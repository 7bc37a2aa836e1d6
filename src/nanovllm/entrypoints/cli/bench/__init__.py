"""`nanovllm bench` and `nanovllm profile`: the speed of a model on this machine, compared with its roofline."""
