"""Norms, rotary embeddings and the per-row tensors of decode steps."""
