"""Hypothesis state machines over pages, caches, schedulers, engines and chunks."""
