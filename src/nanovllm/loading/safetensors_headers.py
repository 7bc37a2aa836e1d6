"""What a checkpoint folder holds: its safetensors files, single or sharded, and where each tensor lies in them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open

from nanovllm.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth")
NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")  # a shard's name: its number, from 1, and how many there are
LONGEST_HEADER = 100_000_000  # bytes, as the format has it


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Where one tensor of a checkpoint lies: `start` and `stop` are byte offsets in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def weight_files(folder: Path) -> tuple[str, ...]:
    """The names of the files that hold a folder's weights, sorted: those of the index, or `model.safetensors`, or numbered shards.

    A file that is missing is among them: each that the index names, the first by number where there is no index. Raises
    `CheckpointError` for an unreadable index, and where there are no weights or none but pickled ones.
    """
    if (folder / INDEX).is_file():
        return tuple(sorted(set(_read_index(folder / INDEX).values())))
    if (folder / SINGLE).is_file():
        return (SINGLE,)
    shards = {path.name: match for path in folder.iterdir() if (match := NUMBERED.fullmatch(path.name))}
    if not shards:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
        why = f"only pickle files ({', '.join(pickled)}), which can run code when read" if pickled else "no weights"
        raise CheckpointError(f"{folder}: {why}; expected {SINGLE} or {INDEX}")
    forms = {(len(match[1]), match[2]) for match in shards.values()}
    if len(forms) > 1:
        raise CheckpointError(f"{folder}: without {INDEX}, the shards {min(shards)} and {max(shards)} cannot be of one checkpoint")
    width, total = forms.pop()
    wanted = (f"model-{number:0{width}}-of-{total}.safetensors" for number in range(1, int(total) + 1))
    missing = next((name for name in wanted if name not in shards), None)
    return tuple(sorted({*shards, missing} - {None}))


def read_headers(folder: Path) -> Mapping[str, TensorHeader]:
    """The headers of all tensors of a checkpoint folder, single or sharded, by tensor name.

    Raises `CheckpointError` naming the file: no safetensors file, an unreadable index, a missing shard, a truncated or garbage file, a
    tensor that the index places elsewhere, and one that occurs twice, in one file or in two.
    """
    index = folder / INDEX
    places = _read_index(index) if index.is_file() else None
    headers: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        if not (folder / file).is_file():
            where = f"{folder}: the other shards' names ask for" if places is None else f"{index}: names"
            raise CheckpointError(f"{where} the shard {file}, which is missing")
        for name, header in _read_file_headers(folder / file).items():
            if name in headers:
                raise CheckpointError(f"{folder}: the tensor {name} occurs twice, in {headers[name].file.name} and in {file}")
            if places is not None and places.get(name) != file:
                placed = f"places in {places[name]}" if name in places else "does not name"
                raise CheckpointError(f"{folder / file}: holds {name}, which the index {placed}")
            headers[name] = header
    if places is not None and (absent := sorted(places.keys() - headers.keys())):
        raise CheckpointError(f"{folder / places[absent[0]]}: lacks {absent[0]}, which the index places there")
    return MappingProxyType(headers)


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=partial(_once, index))["weight_map"]
        unsafe = [file for file in sorted(set(places.values())) if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors shards: {error!r}") from error
    if unsafe:
        raise CheckpointError(f"{index}: shard {unsafe[0]!r} is not a plain file name")
    return places


def _read_file_headers(file: Path) -> dict[str, TensorHeader]:
    # Names are looked at first, because `safe_open`, the judge of all else (offsets, overlaps, lengths), takes the last of two that
    # are the same. The layout: github.com/huggingface/safetensors#format
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries: dict[str, Any] = json.loads(stream.read(min(length, LONGEST_HEADER)), object_pairs_hook=partial(_once, file))
        with safe_open(file, framework="pt"):
            pass
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from error
    data = 8 + length
    return {
        name: TensorHeader(
            file=file,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=data + entry["data_offsets"][0],
            stop=data + entry["data_offsets"][1],
        )
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _once(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which no name may occur twice: `json` would keep the last and say nothing."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"{file}: {name} occurs twice")
        found[name] = value
    return found
