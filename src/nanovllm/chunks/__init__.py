"""KV as values: the public calls that return chunks."""
