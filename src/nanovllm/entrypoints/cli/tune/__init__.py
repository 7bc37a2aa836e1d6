"""`nanovllm tune`: measure the fastest tile configurations of decode kernels on this GPU, and keep them in a file for engines.

A tile configuration says how a kernel divides its work into tiles. In the code its type is `Cut`.
"""
