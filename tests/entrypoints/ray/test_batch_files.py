"""A run over files that is stopped at any place and started again has each row once, in order; what does not fit together is refused."""

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.entrypoints.ray.batch_rows import COLUMNS
from nanovllm.entrypoints.ray.batch_units import (
    JSONL,
    PARQUET,
    PLAN,
    BadRow,
    Plan,
    as_text,
    begin,
    failed_rows,
    from_text,
    make_plan,
    read_rows,
    results_of,
    write_part,
)
from nanovllm.errors import InvalidRequestError
from nanovllm.files import TEMPORARY

ROWS = [{"prompt": f"é {n}", "n": n, "deep": {"a": [n]}} for n in range(40)]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def generate(columns: dict[str, Any]) -> dict[str, Any]:
    """A stand-in for an engine: replies are prompts backwards, and every seventh fails."""
    replies = [prompt[::-1] for prompt in columns["prompt"]]
    errors = ["bad" if len(prompt) % 7 == 0 else None for prompt in columns["prompt"]]
    reasons = ["error" if error else "stop" for error in errors]
    return {**columns, "reply": replies, "reply_token_ids": [[len(reply)] for reply in replies], "finish_reason": reasons, "error": errors}


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path: Path, rows: list[dict[str, Any]], group: int = 7) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def output(folder: Path) -> list[dict[str, Any]]:
    parts = sorted(folder.glob("part-*"))
    return [
        row
        for part in parts
        for row in (pq.read_table(part).to_pylist() if part.suffix == PARQUET else map(json.loads, part.read_text().splitlines()))
    ]


class StoppedError(Exception):
    """The run was stopped."""


def run(plan: Plan, folder: Path, stop: Callable[[int], str] = lambda _: "") -> int:
    """Answer the units that are left; returns how many rows were there before. `stop` says where the run ends in its nth unit."""
    todo = begin(folder, plan)
    for count, unit in enumerate(todo):
        where, part = stop(count), plan.part(folder, unit)
        if where == "before":
            raise StoppedError
        rows = read_rows(from_text(as_text(unit)))
        results = results_of(rows, generate, ["prompt"])
        if where == "writing":  # what a killed process leaves
            (folder / TEMPORARY.replace("*", f"{count:016x}")).write_bytes(b'{"prompt"')
            raise StoppedError
        write_part(part, unit, rows, results)
        if where == "after":
            raise StoppedError
    return plan.num_rows - sum(unit.rows for unit in todo)


@settings(max_examples=40)  # each writes dozens of files to the disk
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["before", "writing", "after"])), max_size=6),
    st.sampled_from([JSONL, PARQUET]),
    st.integers(0, 40),
)
def test_a_run_that_is_stopped_again_and_again_has_each_row_once(
    unit_rows: int, stops: list[tuple[int, str]], suffix: str, num_rows: int
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder, source = Path(made) / "out", Path(made) / f"in{suffix}"
        (write_lines if suffix == JSONL else write_table)(source, ROWS[:num_rows])
        for number, where in stops:
            with suppress(StoppedError):
                run(make_plan([source], unit_rows, {}), folder, lambda n, number=number, where=where: where if n == number else "")
            assert [row["n"] for row in output(folder)] == sorted(row["n"] for row in output(folder))
        run(make_plan([source], unit_rows, {}), folder)
        rows = output(folder)
        assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS[:num_rows]
        assert all(row["reply"] == row["prompt"][::-1] for row in rows)
        assert run(make_plan([source], unit_rows, {}), folder) == num_rows
        failed = sum(failed_rows(part) for part in folder.glob("part-*"))
        assert failed == sum(len(row["prompt"]) % 7 == 0 for row in rows)


@given(
    st.lists(st.one_of(texts.map(lambda t: {"prompt": t}), st.sampled_from([[1], "x", None])), max_size=12),
    st.integers(1, 5),
    st.booleans(),
)
def test_lines_are_cut_where_they_end(rows: list[Any], unit_rows: int, last: bool) -> None:
    """With empty lines between them, with lines that are no rows, and with or without a line feed at the end."""
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "in.jsonl"
        source.write_text("\n" + "\n \n".join(json.dumps(row, ensure_ascii=False) for row in rows) + ("\n" if last else ""))
        plan = make_plan([source], unit_rows, {})
        found = [row for unit in plan.units for row in read_rows(unit)]
        assert plan.num_rows == len(rows) and all(unit.rows <= unit_rows for unit in plan.units)
        assert [None if isinstance(row, BadRow) else row for row in found] == [row if isinstance(row, dict) else None for row in rows]


def test_a_bad_line_fails_alone(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "ab"}\nnonsense\n[1]\n{"other": 1}\n\xff\n' + b"[" * 100_000 + b"\n")

    def typed(columns: dict[str, Any]) -> dict[str, Any]:
        assert columns == {"prompt": ["ab", None]}
        return generate({"prompt": ["ab", "abcdefg"]})

    plan = make_plan([source], 10, {})
    (unit,) = begin(tmp_path / "out", plan)
    rows = read_rows(unit)
    write_part(plan.part(tmp_path / "out", unit), unit, rows, results_of(rows, typed, ["prompt"]))
    told = output(tmp_path / "out")
    assert [row["finish_reason"] for row in told] == ["stop", "error", "error", "error", "error", "error"]
    assert told[1]["line"] == "nonsense" and f"{source}:2: this line is not a JSON object" in told[1]["error"]
    assert "it is a list" in told[2]["error"] and told[3]["other"] == 1
    assert all({*COLUMNS} <= row.keys() for row in told)


def test_several_files_are_one_input_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "b.jsonl", ROWS[5:9])
    write_lines(tmp_path / "in" / "a.jsonl", ROWS[:5])
    (tmp_path / "in" / ".hidden").write_text("x")
    plan = make_plan([tmp_path / "in", write_lines(tmp_path / "c.jsonl", ROWS[9:10])], 3, {})
    run(plan, tmp_path / "out")
    assert [row["n"] for row in output(tmp_path / "out")] == [*range(10)]
    assert [unit.number for unit in plan.units] == [*range(len(plan.units))]


def test_a_part_keeps_the_types_of_a_parquet_file(tmp_path: Path) -> None:
    table = pa.table({"prompt": pa.array(["a"] * 3), "x": pa.array([1, None, 3], pa.int16()), "d": pa.array([{"a": [1.5]}] * 3)})
    pq.write_table(table, tmp_path / "in.parquet")
    run(make_plan([tmp_path / "in.parquet"], 2, {}), tmp_path / "out")
    written = pq.read_table(tmp_path / "out")
    assert written.select(table.column_names) == table and written.num_columns == 7


def test_another_input_or_other_options_are_refused(tmp_path: Path) -> None:
    source, folder = write_lines(tmp_path / "in.jsonl", ROWS[:4]), tmp_path / "out"
    run(make_plan([source], 2, {"model": "tiny"}), folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidRequestError, match="model was tiny, and is other"):
        begin(folder, make_plan([source], 2, {"model": "other"}))
    with pytest.raises(InvalidRequestError, match="unit_rows was 2, and is 3"):
        begin(folder, make_plan([source], 3, {"model": "tiny"}))
    write_lines(source, ROWS[:5])
    with pytest.raises(InvalidRequestError, match=r"in\.jsonl was"):
        begin(folder, make_plan([source], 2, {"model": "tiny"}))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    plan = make_plan([write_lines(tmp_path / "in.jsonl", ROWS[:1])], 2, {})
    with pytest.raises(InvalidRequestError, match=f"'in.jsonl' and no {PLAN}"):
        begin(tmp_path, plan)
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        begin(tmp_path / "in.jsonl", plan)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PLAN).write_text("{")
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        begin(tmp_path / "out", plan)


@pytest.mark.parametrize("names", [[], ["a.csv"], ["a.jsonl", "b.parquet"], ["gone.jsonl"]], ids=str)
def test_an_input_that_cannot_be_read_is_refused(names: list[str], tmp_path: Path) -> None:
    for name in names:
        if name != "gone.jsonl":
            (tmp_path / name).write_text('{"prompt": "a"}')
    with pytest.raises(InvalidRequestError):
        make_plan([tmp_path / name for name in names], 2, {})


def test_a_file_that_is_no_parquet_or_has_changed_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(InvalidRequestError, match=r"a\.parquet"):
        make_plan([tmp_path / "a.parquet"], 2, {})
    plan = make_plan([write_lines(tmp_path / "in.jsonl", ROWS[:4])], 2, {})
    write_lines(tmp_path / "in.jsonl", ROWS[:1])
    with pytest.raises(InvalidRequestError, match="has changed"):
        read_rows(plan.units[0])


@pytest.mark.parametrize("unit_rows", [0, -1, True])
def test_a_size_of_units_that_makes_no_sense_is_refused(unit_rows: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="unit_rows="):
        make_plan([write_lines(tmp_path / "in.jsonl", ROWS)], unit_rows, {})
