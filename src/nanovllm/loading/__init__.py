"""Loading: turns a checkpoint into a `Model`."""
