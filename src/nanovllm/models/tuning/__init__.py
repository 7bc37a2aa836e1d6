"""The tile configurations of an engine: candidates, the tuning file, and the choice at the start of an engine."""
