"""Numbers in FP8 under Triton's interpreter.

Triton 3.7's interpreter converts to e4m3 without a carry, and wrongly below the normal numbers. It multiplies bfloat16 as if its bits were
integers.
"""

from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.ops.kv_cache.fp8 import FP8


def convert_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert and multiply as torch does, until the test ends."""
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    dtypes = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float8e4nv: FP8}
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if tl.float8e4nv not in (source, target):
            return original(values, source, target, rounding)
        found = torch.from_numpy(np.array(values)).contiguous()  # a copy
        found = found.view(dtypes[source]).to(dtypes[target])
        return found.view(bits[found.itemsize]).numpy().reshape(np.shape(values))

    def dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        parts = (
            original(x.data, tl.bfloat16, tl.float32, None).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32)
            for x in (a, b)
        )
        return interpreter.TensorHandle(np.matmul(*parts) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
