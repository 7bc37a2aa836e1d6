"""Simple models that the machines compare an engine with."""
