"""The operations that torch does not have, each a custom op with a fake, a CPU reference and a CUDA kernel, as plain functions."""

from .copy_pages import copy_pages
from .experts import experts
from .kv_write import kv_write
from .move_kv import move_kv
from .paged_decode import paged_decode
from .paged_prefill import paged_prefill
from .route import route

__all__ = ["copy_pages", "experts", "kv_write", "move_kv", "paged_decode", "paged_prefill", "route"]
