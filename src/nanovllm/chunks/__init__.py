"""KV as values: every public call that returns a chunk."""
