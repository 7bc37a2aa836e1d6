"""`nanovllm check`: the outlook of a model before it is loaded, and the comparison of its fast decode path with its plain layers."""
