"""The operations that torch does not have, each a custom op with a fake, a CPU reference and a CUDA kernel, as plain functions."""

from nanovllm.ops.attention.paged_decode import paged_decode
from nanovllm.ops.attention.paged_prefill import paged_prefill
from nanovllm.ops.kv_cache.copy_pages import copy_pages
from nanovllm.ops.kv_cache.kv_write import kv_write
from nanovllm.ops.kv_cache.move_kv import move_kv
from nanovllm.ops.moe.experts import experts
from nanovllm.ops.moe.route import route

__all__ = ["copy_pages", "experts", "kv_write", "move_kv", "paged_decode", "paged_prefill", "route"]
