"""Tool calls: what replies say in each model's own format, as events, and the grammars that force a call."""
