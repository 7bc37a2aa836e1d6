"""Where codes of 4 and 8 bits lie: one after another, in bytes of two, and as the kernels of a GPU read them.

All functions are pure, and those that change a layout are exact inverses of one another. A block is 128 columns. The last block is filled
with codes that belong to no column: zeros of 8 bits, and `MIDDLE` of 4 bits, which stands for 0 too.

A GPU's kernels read elements of 16 bits, because the factors of tensor cores are made of them. An element holds the codes of several
columns of a block that lie far apart, so that one field of neighbouring elements is a tile of neighbouring columns.
"""

import torch

from nanovllm.types import Tensor

BLOCK = 128  # columns whose codes are packed together
HALF = BLOCK // 2
QUARTER = BLOCK // 4
MIDDLE = 8  # a 4-bit code is stored with this offset, so that a nibble is never negative


def fill(bits: int, columns: int, gpu: bool) -> int:
    """Count the codes of a row that fill its last block.

    Args:
        bits: Bits of a code: 4 or 8.
        columns: The number of columns.
        gpu: Whether the codes lie as the kernels of a GPU read them.

    Returns:
        The number of codes, less than 128. Codes of 8 bits need no fill on a CPU.

    Examples:
        >>> fill(4, 130, False), fill(8, 130, True), fill(8, 130, False), fill(8, 256, True)
        (126, 126, 0, 0)
    """
    return -columns % BLOCK if gpu or bits == 4 else 0


def packed(codes: Tensor) -> Tensor:
    """Pack 4-bit codes into bytes: byte j of a block holds column j in its low nibble and column j + 64 in its high nibble.

    Args:
        codes: Codes between -8 and 7, int8 `[..., K]`.

    Returns:
        Bytes, uint8 `[..., 64 * ceil(K / 128)]`.

    Examples:
        >>> packed(torch.tensor([[-8, 7]], dtype=torch.int8))[0, :3].tolist()  # the high nibbles are filled
        [128, 143, 136]
    """
    missing = -codes.shape[-1] % BLOCK
    nibbles = torch.nn.functional.pad(codes + MIDDLE, (0, missing), value=MIDDLE).to(torch.uint8).unflatten(-1, (-1, 2, HALF))
    return (nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)).flatten(-2)


def unpacked(codes: Tensor, columns: int) -> Tensor:
    """Invert `packed`.

    Args:
        codes: Bytes, uint8 `[..., 64 * ceil(columns / 128)]`.
        columns: The number of columns.

    Returns:
        Codes between -8 and 7, int8 `[..., columns]`.

    Examples:
        >>> unpacked(packed(torch.tensor([[-8, 7]], dtype=torch.int8)), 2).tolist()
        [[-8, 7]]
    """
    bytes_ = codes.unflatten(-1, (-1, HALF))
    return (torch.stack((bytes_ & 15, bytes_ >> 4), -2).to(torch.int8) - MIDDLE).flatten(-3)[..., :columns]


def quads(codes: Tensor) -> Tensor:
    """Rearrange 4-bit codes: element i of a block holds the columns i, i + 32, i + 64 and i + 96, from its lowest nibble to its highest.

    Args:
        codes: Bytes as `packed` returns them, uint8 `[..., 64 * blocks]`.

    Returns:
        Two elements of 16 bits in each int32, the first in the low half: `[..., 16 * blocks]`.

    Examples:
        >>> [f"{word:x}" for word in quads(packed(torch.arange(-8, 8, dtype=torch.int8)[None]))[0, :2].view(torch.uint16).tolist()]
        ['8880', '8881', '8882', '8883']
    """
    first, second = codes.unflatten(-1, (-1, 2, QUARTER)).unbind(-2)
    return torch.stack(((first & 15) | (second << 4), (first >> 4) | (second & 0xF0)), -1).flatten(-3).view(torch.int32)


def from_quads(words: Tensor) -> Tensor:
    """Invert `quads`.

    Args:
        words: Two elements in each int32, `[..., 16 * blocks]`.

    Returns:
        Bytes as `packed` returns them, uint8 `[..., 64 * blocks]`.

    Examples:
        >>> codes = packed(torch.arange(-8, 8, dtype=torch.int8)[None])
        >>> torch.equal(from_quads(quads(codes)), codes)
        True
    """
    low, high = words.view(torch.uint8).unflatten(-1, (-1, QUARTER, 2)).unbind(-1)
    return torch.stack(((low & 15) | (high << 4), (low >> 4) | (high & 0xF0)), -2).flatten(-3)


def pairs(codes: Tensor) -> Tensor:
    """Rearrange 8-bit codes: element i of a block holds column i in its low byte and column i + 64 in its high byte.

    Args:
        codes: The bytes of the codes, uint8 `[..., K]`.

    Returns:
        Bytes of elements of 16 bits, uint8 `[..., 128 * ceil(K / 128)]`.

    Examples:
        >>> pairs(torch.arange(128, dtype=torch.uint8)[None])[0, :4].tolist()
        [0, 64, 1, 65]
    """
    missing = -codes.shape[-1] % BLOCK
    if missing:  # padding by nothing would be a copy, too
        codes = torch.nn.functional.pad(codes, (0, missing))
    return codes.unflatten(-1, (-1, 2, HALF)).mT.flatten(-3)


def from_pairs(codes: Tensor, columns: int) -> Tensor:
    """Invert `pairs`.

    Args:
        codes: Bytes of elements of 16 bits, uint8 `[..., 128 * ceil(columns / 128)]`.
        columns: The number of columns.

    Returns:
        The bytes of the codes, uint8 `[..., columns]`.

    Examples:
        >>> from_pairs(pairs(torch.arange(4, dtype=torch.uint8)[None]), 4).tolist()
        [[0, 1, 2, 3]]
    """
    return codes.unflatten(-1, (-1, HALF, 2)).mT.flatten(-3)[..., :columns].contiguous()
