"""Random numbers and the draw of tokens."""
