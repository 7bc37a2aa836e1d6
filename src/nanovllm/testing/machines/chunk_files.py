"""Chunk files with damage or with changed metadata; none of them may be loaded."""

import hashlib
import json
from typing import Any

from hypothesis import strategies as st

UNKNOWN = "0" * 64  # placeholder of a head's own digest while the digest is computed
FALSIFIED = ("key_form", "version", "fingerprint", "rope", "provenance")  # metadata entries


def damaged(raw: bytes, other: bytes, data: st.DataObject) -> dict[str, bytes]:
    """Return a chunk file with each kind of damage, by the name of the damage.

    `other` is a second file, from which some damaged files take their end. If it is equal, such a file may be undamaged.
    """
    head, mask = _head_size(raw), data.draw(st.integers(1, 255))
    in_head, in_kv = data.draw(st.integers(0, head - 1)), data.draw(st.integers(head, len(raw) - 1))
    return {
        "a byte of its head changed": _changed(raw, in_head, mask),
        "a byte of its KV changed": _changed(raw, in_kv, mask),
        "cut off in its head": raw[:in_head],
        "cut off in its KV": raw[:in_kv],
        "too long": raw + raw[in_kv:],
        "KV of another file": raw[:head] + other[_head_size(other) :],
        "continued by another file": raw[:in_kv] + other[in_kv:],
        **{f"another {name}": falsified(raw, name) for name in FALSIFIED},
    }


def falsified(raw: bytes, name: str) -> bytes:
    """Return a chunk file with another value of this metadata entry, and with a correct digest."""
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
    """Return the number of bytes before the KV."""
    length = int.from_bytes(raw[:8], "little")
    return 8 + length + 8 * json.loads(raw[8 : 8 + length])["tokens"]["shape"][0]
