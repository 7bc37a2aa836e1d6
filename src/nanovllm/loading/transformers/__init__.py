"""The transformers fallback: runs checkpoints of architectures without a file in `models/` through transformers, if that is possible."""
