"""Attention over paged KV, and the plans of its kernels."""
