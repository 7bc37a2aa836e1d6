"""The C form of the ops of sampling, for a CPU (`ops/cpu/sampling.c`). A row that C leaves undecided runs in plain torch.

What C leaves: samples that rounding could change, because two tokens nearly tie, and rows whose largest logit is not finite. So tokens,
filters and penalties have the bits of plain torch. Log-probabilities agree within rounding.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from nanovllm.ops import cpu as native
from nanovllm.ops.cpu.build import find_compiler, library
from nanovllm.ops.sampling.philox import STREAM
from nanovllm.types import Tensor

SOURCE = Path(native.__file__).parent / "sampling.c"
# For each function how many pointers it takes, and how many integers after them.
SIGNATURES = MappingProxyType(
    {"uniforms": (2, 4), "draw": (6, 6), "highest": (3, 5), "least_kept": (8, 6), "adjusted": (8, 5), "logprobs": (6, 6)}
)
SYMBOLS = tuple(f"nanovllm_{name}" for name in SIGNATURES)
FLAGS = ("-fno-trapping-math", "-fno-math-errno")
DTYPES = (torch.float32, torch.bfloat16)
BLOCK = 64  # of the C file


Column = tuple[Tensor | None, torch.dtype, int]  # a value, its type, and its numbers per row


def serves(logits: Tensor, *columns: Column) -> bool:
    """Whether C can run over logits `[B, V]`: there are some, all types and sizes are as C reads them, and there is a C compiler."""
    return (
        logits.dtype in DTYPES
        and logits.numel() > 0
        and all(t is None or (t.dtype is dtype and t.shape[0] == len(logits) and t.numel() == len(logits) * n) for t, dtype, n in columns)
        and available()
    )


def serves_adjusted(logits: Tensor, bias: Tensor | None, penalties: Sequence[Tensor | None]) -> bool:
    """Whether `adjusted` can run over these tables: all penalties are given or none is."""
    num = logits.shape[1]
    types = ((torch.bool, num), (torch.int32, num), (torch.float32, 1), (torch.float32, 1), (torch.float32, 1))
    columns = [(tensor, *kind) for tensor, kind in zip(penalties, types, strict=True)]
    return len({tensor is None for tensor in penalties}) == 1 and serves(logits, (bias, torch.float32, num), *columns)


@functools.cache
def available() -> bool:
    """Whether the C file could be built. Without a compiler nothing is said, since the decode step in C warns already."""
    return find_compiler() is not None and library(SOURCE, SYMBOLS, FLAGS) is not None


def uniforms(keys: Tensor, num: int) -> Tensor:
    """Compute the op `uniforms`."""
    out = torch.empty((keys.shape[0], num), dtype=torch.float32)
    _call("uniforms", (keys.contiguous(), out), (keys.shape[0], num, STREAM, torch.get_num_threads()))
    return out


def draw(logits: Tensor, temperature: Tensor, least: Tensor | None, keys: Tensor, reference: Callable[..., Tensor]) -> Tensor:
    """Compute the op `draw`; `reference` decides what C leaves undecided."""
    logits, out = _rows(logits), torch.empty(logits.shape[0], dtype=torch.int32)
    scratch = _scratch(2 * logits.shape[1] + BLOCK)
    columns = [None if column is None else column.contiguous() for column in (temperature, least, keys)]
    if _call("draw", (logits, *columns, out, scratch), (*logits.shape, logits.stride(0), STREAM, *_how(logits))):
        left = out < 0
        out[left] = reference(logits[left], temperature[left], None if least is None else least[left], keys[left])
    return out


def highest(logits: Tensor) -> Tensor:
    """Compute the op `highest`."""
    logits, out = _rows(logits), torch.empty(logits.shape[0], dtype=torch.int32)
    _call("highest", (logits, out, _scratch(logits.shape[1])), (*logits.shape, logits.stride(0), *_how(logits)))
    return out


def least_kept(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    num_candidates: int | None,
    reference: Callable[..., Tensor],
) -> Tensor:
    """Compute the op `least_kept`; `reference` decides what C leaves undecided."""
    logits, out = _rows(logits), torch.empty(logits.shape[0], dtype=torch.float32)
    num = logits.shape[1] if num_candidates is None else min(num_candidates, logits.shape[1])
    options = [None if column is None else column.contiguous() for column in (top_k, top_p, min_p)]
    columns = (temperature.contiguous(), *options, None if min_p is None else min_p.log(), out, _scratch(3 * logits.shape[1]))
    if _call("least_kept", (logits, *columns), (*logits.shape, logits.stride(0), num, *_how(logits))):
        left = out.isnan()
        out[left] = reference(logits[left], temperature[left], *(o if o is None else o[left] for o in options), num_candidates)
    return out


def adjusted(logits: Tensor, bias: Tensor | None, penalties: Sequence[Tensor | None]) -> Tensor:
    """Compute the op `adjusted`. `penalties`: prompt mask, counts, repetition, presence, frequency, or None for each."""
    logits, out = _rows(logits), torch.empty(logits.shape, dtype=torch.float32)
    tables = [None if table is None else table.contiguous() for table in (bias, *penalties)]
    _call("adjusted", (logits, *tables, out), (*logits.shape, logits.stride(0), *_how(logits)))
    return out


def logprobs(logits: Tensor, token_ids: Tensor, num: int, reference: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op `token_logprobs`; `reference` decides what C leaves undecided."""
    logits, num = _rows(logits), min(num, logits.shape[1])
    rows = logits.shape[0]
    outs = (torch.empty(rows), torch.empty((rows, num), dtype=torch.int32), torch.empty((rows, num)))
    scratch = _scratch(logits.shape[1])
    if _call("logprobs", (logits, token_ids.contiguous(), *outs, scratch), (*logits.shape, logits.stride(0), num, *_how(logits))):
        left = outs[0].isnan()
        for out, values in zip(outs, reference(logits[left], token_ids[left], num), strict=True):
            out[left] = values
    return outs


def _rows(logits: Tensor) -> Tensor:
    """The logits with neighbouring columns in neighbouring memory."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _scratch(num_floats: int) -> Tensor:
    """Memory of so many floats per thread."""
    return torch.empty(torch.get_num_threads() * num_floats)


def _how(logits: Tensor) -> tuple[int, int]:
    return torch.get_num_threads(), logits.dtype == torch.bfloat16


def _call(name: str, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> int:
    """Call a function of the C file: pointers first, then integers of 64 bits."""
    return _functions()[name](*(None if t is None else t.data_ptr() for t in tensors), *sizes)


@functools.cache
def _functions() -> dict[str, Callable[..., int]]:
    compiled = library(SOURCE, SYMBOLS, FLAGS)
    assert compiled is not None, "call serves() first: the library was not compiled"
    found = {name: getattr(compiled, symbol) for name, symbol in zip(SIGNATURES, SYMBOLS, strict=True)}
    for name, (pointers, integers) in SIGNATURES.items():
        found[name].argtypes = [*[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * integers]
        found[name].restype = ctypes.c_int64
    return found
