"""The index file of a `ChunkStore`: a description of each of its files, as JSON that is replaced as a whole."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nanovllm.chunks.storage.format import CODES, Head
from nanovllm.errors import ChunkFileError
from nanovllm.files import write_whole

INDEX = ".nanovllm-store.json"
KEYS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The description of one file. `digest` is the SHA-256 of its tokens as little-endian int32."""

    num_bytes: int
    fingerprint: str
    dtype: str
    num_tokens: int
    exact: bool
    digest: str


def entry_of(head: Head) -> Entry:
    """The entry of a file with this head."""
    return Entry(
        num_bytes=head.num_bytes,
        fingerprint=head.fingerprint,
        dtype=CODES[head.dtype],
        num_tokens=len(head.tokens),
        exact=head.provenance.exact,
        digest=hashlib.sha256(head.tokens.astype("<i4").tobytes()).hexdigest(),
    )


def read_index(folder: Path) -> Mapping[str, Entry]:
    """The entries by key; empty if the folder has no index.

    Raises:
        ChunkFileError: The file is not an index.
    """
    path = folder / INDEX
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        index = {key: Entry(**fields) for key, fields in entries.items()}
        if all(KEYS.fullmatch(key) for key in index):
            return index
        raise ValueError("it has an invalid key")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ChunkFileError(f"{path}: not the index of a chunk store: {error}; delete the file to start with an empty store") from error


def write_index(folder: Path, index: Mapping[str, Entry]) -> None:
    """Replace the folder's index.

    Raises:
        OSError: The index cannot be written; the old one stays.
    """
    write_whole(folder / INDEX, json.dumps({key: asdict(entry) for key, entry in index.items()}).encode())
