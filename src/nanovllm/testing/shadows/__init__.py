"""Shadows: simple models in plain Python that the machines compare an engine with."""
