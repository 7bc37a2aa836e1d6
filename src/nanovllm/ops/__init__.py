"""The engine's custom operations as plain functions.

Each function calls a torch custom op of the same name. Each op has a fake (for tracing), a reference in plain torch and a CUDA kernel.
These are the ops that a model's own layer may call. The ops of the fused path are imported from their own files.
Axis names in the annotations are those of `nanovllm.types`. For example, `pages` is `[L, N, 2, K, S, D]`: layers, pages, keys and
values, key/value heads, tokens per page, head_dim. A slot is `page * page_size + offset`: one token's place in the KV memory.
"""

from nanovllm.ops.attention.paged_decode import paged_decode
from nanovllm.ops.attention.paged_prefill import paged_prefill
from nanovllm.ops.kv_cache.copy_pages import copy_pages
from nanovllm.ops.kv_cache.kv_write import kv_write
from nanovllm.ops.kv_cache.move_kv import move_kv
from nanovllm.ops.moe.experts import experts
from nanovllm.ops.moe.route import route

__all__ = ["copy_pages", "experts", "kv_write", "move_kv", "paged_decode", "paged_prefill", "route"]
