"""The counter-based random number generator Philox-4x32-10 in integer torch."""

import torch

from nanovllm.types import Tensor

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
STREAM = 0  # counter word 1; another use of the same (seed, position) would need another value


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox-4x32-10 on words of 32 bits in int64 tensors, which broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product of two 32-bit words has 64 bits. The int64 product wraps around but has the same bits, so a mask follows the shift.
        a, b = c0 * ROUND_A, c2 * ROUND_B
        c0, c1 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD
        c2, c3 = ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + KEY_A) & WORD, (k1 + KEY_B) & WORD
    return c0, c1, c2, c3


def to_unit(words: Tensor) -> Tensor:
    """Convert words of 32 bits to float32 in (0, 1), as described in `uniforms`."""
    # 2n + 1 has at most 24 bits in both cases, so neither the conversion nor the scaling rounds.
    coarse = ((words >> 9) * 2 + 1).float() * 2.0**-24
    fine = (words * 2 + 1).float() * 2.0**-33
    return torch.where(words < 2**23, fine, coarse)
