"""Masks of tokens, one bit per token in words of 32."""

from collections.abc import Collection

import numpy as np

from nanovllm.sampling.compiled_grammar import num_words
from nanovllm.types import Int32


def all_tokens(vocab_size: int) -> Int32[np.ndarray, "W"]:
    """The mask that allows every token of a vocabulary. Bits beyond the vocabulary are 0."""
    words = np.full(num_words(vocab_size), -1, np.int32)
    if vocab_size % 32:
        words[-1] = (1 << vocab_size % 32) - 1
    return words


def leave_out(words: Int32[np.ndarray, "W"], token_ids: Collection[int]) -> None:
    """Remove tokens from a mask, in place, unless no token would be left."""
    if not token_ids:
        return
    ids, left = np.fromiter(token_ids, np.int64, len(token_ids)), words.copy()
    np.bitwise_and.at(left.view(np.uint32), ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    if left.any():
        words[:] = left
