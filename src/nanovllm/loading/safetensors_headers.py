"""Reads which tensors a checkpoint folder has, and where they are in its safetensors files, single or sharded."""

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
NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")  # a shard's number, from 1, and the number of shards
LONGEST_HEADER = 100_000_000  # bytes, the limit of the format


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor of a checkpoint file.

    Attributes:
        file: The safetensors file.
        dtype: The dtype, in the format's spelling, such as `"BF16"`.
        shape: The shape.
        start: Where its bytes begin in the file.
        stop: Where its bytes end.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def weight_files(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of a folder's weight files: the files of the index, or `model.safetensors`, or numbered shards.

    Missing files are included: each missing file that the index names, and without an index the first missing shard.

    Raises:
        CheckpointError: The index is unreadable, or the folder has no safetensors weights.
    """
    if (folder / INDEX).is_file():
        return tuple(sorted(set(_read_index(folder / INDEX).values())))
    if (folder / SINGLE).is_file():
        return (SINGLE,)
    shards = {path.name: match for path in folder.iterdir() if (match := NUMBERED.fullmatch(path.name))}
    if not shards:
        others = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
        why = f"only pickle files ({', '.join(pickled)}), which can run code when read" if pickled else "no weights"
        if others:
            why = f"the safetensors files {', '.join(others[:3])} have other names, and no {INDEX} lists them"
        raise CheckpointError(f"{folder}: {why}; expected {SINGLE} or {INDEX}")
    forms = {(len(match[1]), match[2]) for match in shards.values()}
    if len(forms) > 1:
        raise CheckpointError(f"{folder}: without {INDEX}, the shards {min(shards)} and {max(shards)} cannot be of one checkpoint")
    width, total = forms.pop()
    wanted = (f"model-{number:0{width}}-of-{total}.safetensors" for number in range(1, int(total) + 1))
    missing = next((name for name in wanted if name not in shards), None)
    return tuple(sorted({*shards, missing} - {None}))


def read_headers(folder: Path) -> Mapping[str, TensorHeader]:
    """Read the headers of all tensors of a checkpoint folder, by tensor name.

    Raises:
        CheckpointError: There is no safetensors file, the index is unreadable, a shard is missing, or a file is damaged. Or a tensor occurs
            twice, or in another file than the index says. The message names the file.
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
        raise CheckpointError(
            f"{folder / places[absent[0]]}: lacks {absent[0]}, which the index places in it: copy or download the file again"
        )
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
    # Names are compared first, because `safe_open` takes the last of two equal names. It validates everything else: offsets, overlaps and
    # lengths. The format: github.com/huggingface/safetensors#format
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if 8 + length > size and length <= LONGEST_HEADER:
                raise _truncated(file, 8 + length - size, at_least=True)
            entries: dict[str, Any] = json.loads(stream.read(min(length, LONGEST_HEADER)), object_pairs_hook=partial(_once, file))
            if (missing := 8 + length + _data_bytes(entries) - size) > 0:
                raise _truncated(file, missing)
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


def _data_bytes(entries: Any) -> int:
    """Where the last tensor ends after the header. 0 if the header has another form, which `safe_open` refuses."""
    try:
        return max((int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"), default=0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return 0


def _truncated(file: Path, missing: int, *, at_least: bool = False) -> CheckpointError:
    many = f"{'at least ' if at_least else ''}{missing:,} bytes are missing"
    return CheckpointError(f"{file}: not a whole safetensors file: {many}: copy or download it again")


def _once(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, in which no name may occur twice. `json` itself would silently keep the last value."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise CheckpointError(f"{file}: {name} occurs twice")
        values[name] = value
    return values
