"""`nanovllm generate --input FILE --output FILE`: the requests of a file in the form of OpenAI's batches, with resume."""
