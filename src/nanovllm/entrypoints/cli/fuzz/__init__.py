"""`nanovllm fuzz`: run the state machines of `nanovllm.testing`, or your own, for a given time."""
