"""A checkpoint becomes a `Model`."""
