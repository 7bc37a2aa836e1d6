"""The comparison of a model's fast path with its plain layers."""
