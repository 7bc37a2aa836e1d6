"""Chunk files that were damaged, or made to say something else: none of them may be loaded."""

import hashlib
import json
from typing import Any

from hypothesis import strategies as st

UNKNOWN = "0" * 64  # stands in the place of a head's own digest while that is computed
LIES = ("key_form", "version", "fingerprint", "rope", "provenance")


def damaged(raw: bytes, other: bytes, data: st.DataObject) -> dict[str, bytes]:
    """A chunk file after every kind of damage, somewhere; `other` is a second one. Where that is equal, a mixture of both may be whole."""
    head, mask = _head_size(raw), data.draw(st.integers(1, 255))
    before, behind = data.draw(st.integers(0, head - 1)), data.draw(st.integers(head, len(raw) - 1))
    return {
        "a byte of its head changed": _changed(raw, before, mask),
        "a byte of its KV changed": _changed(raw, behind, mask),
        "cut off in its head": raw[:before],
        "cut off in its KV": raw[:behind],
        "too long": raw + raw[behind:],
        "its KV of another file": raw[:head] + other[_head_size(other) :],
        "continued by another file": raw[:behind] + other[behind:],
        **{f"another {name}": told_otherwise(raw, name) for name in LIES},
    }


def told_otherwise(raw: bytes, name: str) -> bytes:
    """A chunk file with another entry in its metadata, under a digest that fits."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata: dict[str, Any] = header["__metadata__"]
    metadata |= {name: _otherwise(name, metadata[name]), "sha256": UNKNOWN}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text + raw[8 + length : _head_size(raw)]
    digest = hashlib.sha256(head).hexdigest()
    return head.replace(f'"sha256":"{UNKNOWN}"'.encode(), f'"sha256":"{digest}"'.encode(), 1) + raw[_head_size(raw) :]


def _otherwise(name: str, value: str) -> str:
    match name:
        case "rope":
            rope = json.loads(value)
            return json.dumps({**rope, "theta": rope["theta"] + 1})
        case "provenance":
            return json.dumps([] if json.loads(value) else ["composed, recompute=0"])
        case _:
            return value + "0"


def _changed(raw: bytes, at: int, mask: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]


def _head_size(raw: bytes) -> int:
    """Bytes before the KV."""
    length = int.from_bytes(raw[:8], "little")
    return 8 + length + 8 * json.loads(raw[8 : 8 + length])["tokens"]["shape"][0]
