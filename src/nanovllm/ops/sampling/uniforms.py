"""`uniforms`: the random numbers of a draw, a pure function of (request seed, position, token id)."""

import torch

from nanovllm.types import Float32, Int64, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("uniforms(Tensor keys, SymInt num) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
STREAM = 0  # counter word 1: another use of the same (seed, position) takes another number


def uniforms(keys: Int64[Tensor, "B 2"], num: int) -> Float32[Tensor, "B V"]:
    """`num` uniform numbers in the open interval (0, 1) for each key (seed, position); bitwise the same on a CPU and a GPU.

    Row b depends on `keys[b]` alone, and its first n numbers do not depend on `num`, which is at most 2**31 - 1.
    The bits are Philox-4x32-10's (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11). The key is the seed's low and
    high 32 bits. The counter of number i is (i // 4, `STREAM`, the position's low and high 32 bits), and its output word i % 4 is used.
    A word w becomes the midpoint of its cell, exact in float32: (w >> 9) + 1/2 in units of 2**-23, and where w < 2**23 the nine bits that
    this drops are used as well, w + 1/2 in units of 2**-32, so that the numbers are finest near 0.
    """
    return torch.ops.nanovllm.uniforms.default(keys, num)


@torch.library.register_fake("nanovllm::uniforms", lib=_LIBRARY)
def _fake(keys: Tensor, num: int) -> Tensor:
    return keys.new_empty((keys.shape[0], num), dtype=torch.float32)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 in integer torch: words of 32 bits, held in int64 tensors that broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words fills 64 bits: the int64 that wraps around holds the same bits, hence a mask after the shift
        a, b = c0 * ROUND_A, c2 * ROUND_B
        c0, c1 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD
        c2, c3 = ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + KEY_A) & WORD, (k1 + KEY_B) & WORD
    return c0, c1, c2, c3


def to_unit(words: Tensor) -> Tensor:
    """Words of 32 bits to float32 in (0, 1), as `uniforms` documents."""
    # 2n + 1 has at most 24 bits in either case: neither the conversion nor the scaling rounds
    coarse = ((words >> 9) * 2 + 1).float() * 2.0**-24
    fine = (words * 2 + 1).float() * 2.0**-33
    return torch.where(words < 2**23, fine, coarse)


def _reference(keys: Tensor, num: int) -> Tensor:
    seed, position = keys.unsqueeze(-1).unbind(1)
    counter = (torch.arange(-(-num // 4)), torch.tensor(STREAM), position & WORD, (position >> 32) & WORD)
    words = philox(counter, (seed & WORD, (seed >> 32) & WORD))
    return to_unit(torch.stack(words, -1).flatten(1)[:, :num])


def _cuda(keys: Tensor, num: int) -> Tensor:
    from nanovllm.ops.sampling.triton_sampling import launch_uniforms  # triton need not be installed without a GPU

    return launch_uniforms(keys, num)


_LIBRARY.impl("uniforms", _reference, "CPU")
_LIBRARY.impl("uniforms", _cuda, "CUDA")
