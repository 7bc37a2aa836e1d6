"""Collective operations between the ranks that run one model together."""
