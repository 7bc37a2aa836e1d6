"""Random numbers and sampling of tokens."""
