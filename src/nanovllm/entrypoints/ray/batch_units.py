"""The files of a run: its input, cut into units of some rows, and its output, a part for each unit. A part is there whole, or not at all.

So a run that was ended, however that was, goes on with the units that have no part. Two workers that run the same unit write the same rows.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.ray.batch_rows import COLUMNS, ERROR, columns_of, plain
from nanovllm.errors import InvalidRequestError
from nanovllm.files import delete_abandoned, write_whole

JSONL, PARQUET = FORMATS = (".jsonl", ".parquet")
PLAN = "_plan.json"  # readers of a folder of Parquet files leave out such names
FOOTER = 1 << 16  # bytes at the end of a Parquet file, where it says what it has
SHOWN = 200  # characters of a line that is no row


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some rows of a file, one after another.

    Attributes:
        number: Its place among all units, from 0.
        file: The file.
        start: The place of its first row: the byte where a line begins, or the row in its row group.
        rows: How many rows it has.
        group: The row group of a Parquet file; 0 otherwise.
        line: The number of its first line, from 1; 0 in a Parquet file.
    """

    number: int
    file: str
    start: int
    rows: int
    group: int = 0
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run: what it reads, and what is asked of each row.

    Attributes:
        suffix: The format of input and output, `".jsonl"` or `".parquet"`.
        units: The units.
        inputs: A digest of each file of the input, by its name.
        asked: What the replies depend on.
    """

    suffix: str
    units: tuple[Unit, ...]
    inputs: dict[str, str]
    asked: dict[str, str]

    @property
    def num_rows(self) -> int:
        """The rows of all units."""
        return sum(unit.rows for unit in self.units)

    def part(self, folder: Path, unit: Unit) -> Path:
        """The file of a unit's results."""
        return folder / f"part-{unit.number:08d}{self.suffix}"


def make_plan(paths: Sequence[Path], unit_rows: int, asked: dict[str, str]) -> Plan:
    """Cut an input into units.

    Args:
        paths: Files, and folders of files, of one format: JSON lines or Parquet.
        unit_rows: How many rows a unit has at most.
        asked: What the replies depend on besides.

    Raises:
        InvalidRequestError: There is no file, one cannot be read, or the formats differ.

    Examples:
        >>> _ = Path("in.jsonl").write_text('{"prompt": "a"}\\n\\n{"prompt": "b"}\\n{"prompt": "c"}\\n')
        >>> [(unit.start, unit.rows, unit.line) for unit in make_plan([Path("in.jsonl")], 2, {}).units]
        [(0, 2, 1), (33, 1, 4)]
    """
    if isinstance(unit_rows, bool) or not isinstance(unit_rows, int) or unit_rows < 1:
        raise InvalidRequestError(f"unit_rows={unit_rows!r} must be an integer of at least 1")
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if not file.name.startswith(".")]
    suffixes = {file.suffix for file in files}
    if len(suffixes) != 1 or not suffixes <= {*FORMATS}:
        raise InvalidRequestError(f"the input has files of {sorted(suffixes) or 'no kind'}: give files of one of {', '.join(FORMATS)}")
    (suffix,) = suffixes
    units, inputs = list[Unit](), dict[str, str]()
    for file in files:
        try:
            found, digest = (_cut_lines if suffix == JSONL else _cut_parquet)(file, unit_rows)
        except OSError as error:
            raise InvalidRequestError(f"{file}: {error.strerror or error}") from None
        inputs[str(file)] = digest
        units += [Unit(number=len(units) + place, file=str(file.resolve()), **where) for place, where in enumerate(found)]
    return Plan(suffix=suffix, units=tuple(units), inputs=inputs, asked={**asked, "unit_rows": str(unit_rows)})


def _cut_lines(file: Path, unit_rows: int) -> tuple[list[dict[str, int]], str]:
    digest, found, at = hashlib.sha256(), list[dict[str, int]](), 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            digest.update(line)
            if line.strip():
                if not found or found[-1]["rows"] == unit_rows:
                    found.append({"start": at, "rows": 0, "line": number})
                found[-1]["rows"] += 1
            at += len(line)
    return found, digest.hexdigest()


def _cut_parquet(file: Path, unit_rows: int) -> tuple[list[dict[str, int]], str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    except pa.ArrowException as error:
        raise InvalidRequestError(f"{file} is no Parquet file: {error}") from None
    with file.open("rb") as data:
        size = data.seek(0, io.SEEK_END)
        data.seek(max(0, size - FOOTER))
        digest = hashlib.sha256(b"%d:%b" % (size, data.read())).hexdigest()
    starts = ((group, start, rows) for group, rows in enumerate(sizes) for start in range(0, rows, unit_rows))
    return [{"start": start, "rows": min(unit_rows, rows - start), "group": group} for group, start, rows in starts], digest


def begin(folder: Path, plan: Plan) -> list[Unit]:
    """Make the folder of an output ready, or look at what an earlier run has left there.

    Args:
        folder: The folder. The parts of an earlier run of the same plan are kept.
        plan: The plan.

    Returns:
        The units that have no part.

    Raises:
        InvalidRequestError: The folder cannot be written, or it has the output of another plan, or something else.
    """
    told = json.dumps({"inputs": plan.inputs, "asked": plan.asked}, indent=1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        delete_abandoned(folder)
        if (folder / PLAN).exists():
            before = json.loads((folder / PLAN).read_text())
            for name, value in json.loads(told).items():
                _require_same(folder, before.get(name, {}), value)
        elif left := [path.name for path in folder.iterdir() if not path.name.startswith(".")]:
            raise InvalidRequestError(
                f"{folder} has {left[0]!r} and no {PLAN}: give a folder that is empty or has the output of this input"
            )
        else:
            write_whole(folder / PLAN, told.encode())
    except (OSError, json.JSONDecodeError, AttributeError) as error:
        raise InvalidRequestError(f"{folder} cannot be used: {error}") from None
    there = {path.name for path in folder.iterdir()}
    return [unit for unit in plan.units if plan.part(folder, unit).name not in there]


def _require_same(folder: Path, before: dict[str, str], now: dict[str, str]) -> None:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            was, given = str(before.get(name))[:SHOWN], str(now.get(name))[:SHOWN]
            raise InvalidRequestError(f"{folder} has the output of another input: {name} was {was}, and is {given}; give another folder")


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is no row, with the reason."""

    text: str
    error: InvalidRequestError


def read_rows(unit: Unit) -> list[dict[str, Any] | BadRow]:
    """The rows of a unit.

    Raises:
        OSError: The file cannot be read any more.
        InvalidRequestError: It is shorter than it was.
    """
    rows = [_row(unit, number, line) for number, line in _lines(unit)] if unit.line else _table(unit).to_pylist()
    if len(rows) != unit.rows:
        raise InvalidRequestError(f"{unit.file} has changed since the run began: it ends before its unit {unit.number}")
    return rows


def _lines(unit: Unit) -> Iterator[tuple[int, bytes]]:
    left = unit.rows
    with open(unit.file, "rb") as lines:
        lines.seek(unit.start)
        for number, line in enumerate(lines, unit.line):
            if line.strip():
                yield number, line
                left -= 1
            if not left:
                return


def _row(unit: Unit, number: int, line: bytes) -> dict[str, Any] | BadRow:
    try:
        row: Any = json.loads(line)
        if isinstance(row, dict):
            return row
        reason = f"it is a {type(row).__name__}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    text = line[:SHOWN].decode(errors="replace").rstrip()
    return BadRow(text, InvalidRequestError(f"{unit.file}:{number}: this line is not a JSON object: {reason}"))


def _table(unit: Unit) -> Any:
    return _row_group(unit.file, unit.group).slice(unit.start, unit.rows)


@lru_cache(maxsize=1)
def _row_group(file: str, group: int) -> Any:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        return parquet.read_row_group(group)


def write_part(part: Path, unit: Unit, rows: Sequence[dict[str, Any] | BadRow], results: dict[str, list[Any]]) -> None:
    """Write the results of a unit: its rows with four more columns, as a file that is there whole or not at all.

    Args:
        part: The file.
        unit: The unit.
        rows: Its rows.
        results: The columns of `columns_of`, with a value for each row.

    Raises:
        OSError: The file cannot be written.
    """
    if unit.line:
        told = ({"line": row.text} if isinstance(row, BadRow) else row for row in rows)
        added = zip(*(results[name] for name in COLUMNS), strict=True)
        lines = (json.dumps({**row, **dict(zip(COLUMNS, values, strict=True))}) for row, values in zip(told, added, strict=True))
        write_whole(part, "".join(f"{line}\n" for line in lines).encode())
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, types = _table(unit), (pa.string(), pa.list_(pa.int32()), pa.string(), pa.string())
    for name, kind in zip(COLUMNS, types, strict=True):
        table = table.append_column(name, pa.array(results[name], kind))
    data = io.BytesIO()
    pq.write_table(table, data)
    write_whole(part, data.getvalue())


def failed_rows(part: Path) -> int:
    """How many rows of a part have an error."""
    if part.suffix == JSONL:
        with part.open("rb") as lines:
            return sum(json.loads(line)[ERROR] is not None for line in lines)
    import pyarrow.parquet as pq

    column = pq.read_table(part, columns=[ERROR]).column(ERROR)
    return len(column) - column.null_count


def results_of(rows: Sequence[dict[str, Any] | BadRow], generate: Any, columns: Sequence[str]) -> dict[str, list[Any]]:
    """The results of rows, in their order.

    Args:
        rows: The rows of a unit.
        generate: A function of columns, as a `BatchGenerator` is one.
        columns: The columns that it reads.

    Returns:
        The columns of `columns_of`.
    """
    good = [row for row in rows if not isinstance(row, BadRow)]
    made = generate({name: [plain(row.get(name)) for row in good] for name in columns}) if good else {}
    bad = columns_of([row.error for row in rows if isinstance(row, BadRow)])
    results: dict[str, list[Any]] = {}
    for name in COLUMNS:
        goods, bads = iter(made.get(name, ())), iter(bad[name])
        results[name] = [next(bads if isinstance(row, BadRow) else goods) for row in rows]
    return results


def as_text(unit: Unit) -> str:
    """A unit as a text, which passes through columns unchanged."""
    return json.dumps(asdict(unit))


def from_text(text: str) -> Unit:
    """The unit of `as_text`."""
    return Unit(**json.loads(text))
