"""Norms, rotations and the per-row tensors of decode steps."""
