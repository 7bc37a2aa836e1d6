"""Public helpers for testing an engine, a model or an op: strategies, machines, shadow models and small random models."""
