"""Executors: how a step runs on a device."""
