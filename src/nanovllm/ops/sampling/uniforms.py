"""`uniforms`: the random numbers for sampling, a pure function of (request seed, position, token id)."""

import torch

from nanovllm.ops.sampling import cpu_sampling
from nanovllm.ops.sampling.philox import STREAM, WORD, philox, to_unit
from nanovllm.types import Float32, Int64, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")


_LIBRARY.define("uniforms(Tensor keys, SymInt num) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def uniforms(keys: Int64[Tensor, "B 2"], num: int) -> Float32[Tensor, "B V"]:
    """Return `num` uniform numbers in the open interval (0, 1) for each key (seed, position), with the same bits on a CPU and a GPU.

    Row b depends only on `keys[b]`. Its first n numbers do not depend on `num`, which is at most 2**31 - 1.

    The generator is Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11). Its key is the low and high 32
    bits of the seed. Number i uses output word i % 4 of the counter (i // 4, `STREAM`, low and high 32 bits of the position).

    A word w becomes the midpoint of its cell, which is exact in float32: (w >> 9) + 1/2 in units of 2**-23. This drops nine bits. If
    w < 2**23, they are used as well: w + 1/2 in units of 2**-32. So the numbers are finest near 0.
    """
    return torch.ops.nanovllm.uniforms.default(keys, num)


@torch.library.register_fake("nanovllm::uniforms", lib=_LIBRARY)
def _fake(keys: Tensor, num: int) -> Tensor:
    return keys.new_empty((keys.shape[0], num), dtype=torch.float32)


def _reference(keys: Tensor, num: int) -> Tensor:
    seed, position = keys.unsqueeze(-1).unbind(1)
    counter = (torch.arange(-(-num // 4)), torch.tensor(STREAM), position & WORD, (position >> 32) & WORD)
    words = philox(counter, (seed & WORD, (seed >> 32) & WORD))
    return to_unit(torch.stack(words, -1).flatten(1)[:, :num])


def _cpu(keys: Tensor, num: int) -> Tensor:
    return cpu_sampling.uniforms(keys, num) if keys.dtype is torch.int64 and cpu_sampling.available() else _reference(keys, num)


def _cuda(keys: Tensor, num: int) -> Tensor:
    from nanovllm.ops.sampling.triton_sampling import launch_uniforms  # triton need not be installed without a GPU

    return launch_uniforms(keys, num)


_LIBRARY.impl("uniforms", _cpu, "CPU")
_LIBRARY.impl("uniforms", _cuda, "CUDA")
