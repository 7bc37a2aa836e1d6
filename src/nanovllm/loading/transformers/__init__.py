"""Checkpoints of architectures without a file in `models/`: what transformers has for them, whether that can run, and their weights."""
