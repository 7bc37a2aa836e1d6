"""Routing and the products of mixtures of experts."""
