"""`nanovllm models`: list the built-in architectures and how each runs."""
