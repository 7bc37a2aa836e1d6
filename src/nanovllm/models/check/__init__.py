"""Whether the fast path of a model computes what its plain layers compute."""
