"""`nanovllm tune`: how the kernels of decode steps are cut fastest on this GPU, measured, and kept in a file that engines read."""
