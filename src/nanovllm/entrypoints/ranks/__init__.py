"""An engine of several processes: every rank makes the same calls on a part of the model."""
