"""Keys of pages that outlive the prefix index: a digest of the namespace and of all tokens up to the end of a page.

The index finds a page by the page before it, which may be gone when the page's KV is looked up in host memory. A digest of 32 bytes
commits to the whole prefix instead. It is cheap: the 1,024 keys of a prompt of 16,384 tokens take less
than a millisecond.
"""

from collections.abc import Iterator
from hashlib import blake2b
from struct import pack

import numpy as np

from nanovllm.state.prefix_cache import ROOT, PrefixIndex

KEY_BYTES = 32
PARTLY = b"+"  # at the end of the key of a page that is partly filled
FRAME = b"f"  # at the end of the key of a page's frame, where both are kept apart


def keys_from(tokens: np.ndarray, start: int, page_size: int, namespace: int = 0) -> Iterator[bytes]:
    """The keys of the full pages of a sequence, from page number `start` on, each made when it is asked for.

    Args:
        tokens: The tokens of the sequence from its first one on, int32.
        start: The number of leading pages whose keys are left out.
        page_size: Tokens per page.
        namespace: The namespace of the sequence.
    """
    hashed, page = _hash_of(namespace), page_size * tokens.itemsize
    hashed.update(tokens[: start * page_size].tobytes())
    after, update, digest = tokens[start * page_size :].tobytes(), hashed.update, hashed.digest
    for at in range(0, len(after) - page + 1, page):
        update(after[at : at + page])
        yield digest()


def key_of(tokens: np.ndarray, namespace: int = 0) -> bytes:
    """The key of the last page of some tokens, int32, which they do not fill."""
    hashed = _hash_of(namespace)
    hashed.update(tokens.tobytes())
    return hashed.digest() + PARTLY


def is_full(key: bytes) -> bool:
    """Whether a key is that of a full page, which any request with this prefix can use."""
    return len(key) == KEY_BYTES


def frame_key(key: bytes) -> bytes:
    """The key of the frame (the KV memory of sliding-window layers) of the full page with this key."""
    return key + FRAME


def is_frame(key: bytes) -> bool:
    """Whether a key is that of a frame."""
    return len(key) > KEY_BYTES and key.endswith(FRAME)


def keys_of(index: PrefixIndex, pages: np.ndarray) -> list[bytes]:
    """The keys of indexed pages, in the order given. The tokens before each radix-tree node are hashed once."""
    size, keys = index.page_size, dict[int, bytes]()
    heads, places = index.run_of.get(pages), index.place_of.get(pages)
    for head in dict.fromkeys(heads.tolist()):
        run, at = index.runs[head], 0
        before, namespace = _tokens_before(index, run.parent)
        hashed = _hash_of(namespace)
        for part in before:
            hashed.update(part.tobytes())
        for place in np.sort(places[heads == head]).tolist():
            hashed.update(run.tokens[at * size : (place + 1) * size].tobytes())
            at = place + 1
            keys[run.pages.item(place)] = hashed.digest()
    return [keys[page] for page in pages.tolist()]


def _hash_of(namespace: int) -> blake2b:
    return blake2b(pack("<q", namespace), digest_size=KEY_BYTES)


def _tokens_before(index: PrefixIndex, page: int) -> tuple[list[np.ndarray], int]:
    """The tokens up to the end of an indexed page, in parts, and the namespace. A root has no tokens."""
    parts = list[np.ndarray]()
    while page >= 0:
        run = index.runs[index.run_of[page]]
        parts.append(run.tokens[: (index.place_of[page] + 1) * index.page_size])
        page = run.parent
    return parts[::-1], ROOT - page
