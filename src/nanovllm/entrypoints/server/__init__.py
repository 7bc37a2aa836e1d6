"""`nanovllm serve`: OpenAI's interface over HTTP, in front of an engine that runs in a process of its own."""
