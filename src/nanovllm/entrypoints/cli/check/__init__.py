"""Whether a model's fast decode path computes what its plain layers do, on its own weights; `nanovllm check`, and a look at start."""
