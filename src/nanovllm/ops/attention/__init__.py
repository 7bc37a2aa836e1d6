"""Attention over pages, and the plans that it follows."""
