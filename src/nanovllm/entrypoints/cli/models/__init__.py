"""`nanovllm models`: the built-in architectures and how they run."""
