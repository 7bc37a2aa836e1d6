"""The prefixes of a request's prompt, as numbers: requests whose prompts begin alike have the first numbers in common.

No tokenizer is asked. The bytes of a prompt, as the request has it, stand for its tokens: what a conversation adds comes after what it had.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

STEP = 64  # bytes: about a page of 16 tokens of English text
PART = 16  # a prefix is longer than the one before it by a 16th at least, so that a prompt of 16 MB has a few hundred
SALT_FIELDS = ("model", "cache_salt")
_encode = msgspec.json.Encoder().encode


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """What a request says of its prompt, in the order in which chat templates render it.

    Args:
        body: The fields of a request to `/v1/chat/completions`, `/v1/completions` or `/v1/responses`.

    Returns:
        Bytes that begin alike if the prompts do. Nothing, if there is no prompt.

    Examples:
        >>> short = prompt_bytes({"messages": [{"role": "user", "content": "Hello"}]})
        >>> prompt_bytes({"messages": [{"role": "user", "content": "Hello"}, {"role": "user", "content": "again"}]}).startswith(short)
        True
    """
    if "prompt" in body:
        prompt: Any = body["prompt"]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # rows of one request run together, so the first one speaks for all
        return prompt.encode(errors="replace") if isinstance(prompt, str) else _joined(prompt)
    said: Any = body["messages"] if "messages" in body else body.get("input")
    before = _encode([body.get("tools"), body.get("instructions")])
    return b"" if said is None else before + _joined([said] if isinstance(said, str) else said)


def _joined(parts: Any) -> bytes:
    return b"".join(_encode(part) + b"," for part in parts) if isinstance(parts, list) else b""


def prefix_keys(prompt: bytes, salt: bytes = b"") -> tuple[int, ...]:
    """Numbers of the prefixes of a prompt, from short to long.

    A prompt that is shorter than `STEP` bytes has one number. The places where prefixes end are the same for all prompts.

    Args:
        prompt: The bytes of `prompt_bytes`.
        salt: What separates requests that must not share KV, such as their API keys.

    Returns:
        Numbers of 63 bits. None for an empty prompt.

    References:
        Chained hashes of blocks, as in automatic prefix caching: https://docs.vllm.ai/en/latest/design/prefix_caching.html

    Examples:
        >>> first, second = prefix_keys(b"a" * 200), prefix_keys(b"a" * 130 + b"b" * 70)
        >>> len(first), first[:2] == second[:2], first[2] == second[2]
        (3, True, False)
    """
    if not prompt:
        return ()
    hashed, at, keys = hashlib.blake2b(salt, digest_size=8), 0, []
    for end in _ends(len(prompt)):
        hashed.update(memoryview(prompt)[at:end])
        keys.append(int.from_bytes(hashed.digest()) >> 1)
        at = end
    return tuple(keys)


def request_keys(body: Mapping[str, Any], authorization: bytes = b"") -> tuple[int, ...]:
    """The numbers of a request's prefixes. Requests with different keys, salts or models have none in common."""
    salt = _encode([hashlib.sha256(authorization).hexdigest(), *(body.get(name) for name in SALT_FIELDS)])
    return prefix_keys(prompt_bytes(body), salt)


def _ends(size: int) -> Iterator[int]:
    end = min(STEP, size)
    while end <= size:
        yield end
        end += max(STEP, end // PART)
