"""Quantised checkpoints: what their configs say, where their tensors are, and how they become quantised matrices."""
