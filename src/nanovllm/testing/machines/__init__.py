"""Hypothesis state machines for pages, caches, schedulers, engines and chunks."""
