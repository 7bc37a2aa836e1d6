"""nanovllm"""
