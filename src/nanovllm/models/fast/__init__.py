"""The fast forms of decode layers: fused kernels on a GPU, C on a CPU."""
