"""Routing and matrix products of mixtures of experts."""
