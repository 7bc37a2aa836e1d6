"""Decode kernels in C for CPUs, and their build."""
