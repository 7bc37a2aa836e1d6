"""Rows on a real Ray: the library's replies, an actor that dies in the middle, and a run that is stopped and gone on from."""

import _thread
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nanovllm as nv
from nanovllm.entrypoints.ray.batch_generator import BatchGenerator
from nanovllm.entrypoints.ray.generate_files import generate_files
from nanovllm.errors import InvalidRequestError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 128}
GREEDY = nv.SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
NUM_ROWS = 240


@pytest.fixture(scope="module")
def expected() -> list[str]:
    prompts = [f"{n} Once upon a time" for n in range(NUM_ROWS)]
    return [output.text for output in nv.LLM("tiny", **OPTIONS).generate(prompts, GREEDY)]


def when(folder: Path, num_parts: int, do: Any) -> threading.Thread:
    """Do something once a run has written so many parts."""

    def wait() -> None:
        end = time.monotonic() + 300
        while len([*folder.glob("part-*")]) < num_parts and time.monotonic() < end:
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_map_batches_makes_the_class_in_its_actors(cluster: Any, expected: list[str]) -> None:
    import ray.data

    rows = [{"n": n, "prompt": f"{n} Once upon a time" if n % 10 else ""} for n in range(40)]
    made = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        BatchGenerator,
        batch_size=10,
        compute=ray.data.ActorPoolStrategy(size=2),
        fn_constructor_kwargs={"model": "tiny", "sampling": GREEDY, **OPTIONS},
    )
    found = sorted(made.take_all(), key=lambda row: row["n"])
    assert [row["n"] for row in found] == [*range(40)]
    assert all(row["reply"] == expected[row["n"]] and row["error"] is None for row in found if row["n"] % 10)
    assert all(len(row["reply_token_ids"]) == 48 for row in found if row["n"] % 10)
    assert all("prompt is empty" in row["error"] and row["finish_reason"] == "error" for row in found if not row["n"] % 10)


def workers() -> list[psutil.Process]:
    """The processes of the actors that answer units."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "UnitWorker" in " ".join(process.cmdline())]


def test_a_run_outlives_a_stop_and_the_death_of_an_actor(cluster: Any, expected: list[str], tmp_path: Path) -> None:
    source, folder = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"n": n, "prompt": f"{n} Once upon a time"}) + "\n" for n in range(NUM_ROWS)))
    how: dict[str, Any] = {"sampling": GREEDY, "concurrency": 2, "unit_rows": 4, "progress": True, **OPTIONS}
    stopping, handler = when(folder, 5, _thread.interrupt_main), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background of a shell begins without it
    try:
        with pytest.raises(KeyboardInterrupt):
            generate_files(source, folder, **how)
    finally:
        stopping.join()
        signal.signal(signal.SIGINT, handler)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert 5 <= len(before) < NUM_ROWS / 4
    killed = list[int]()

    def kill_one() -> None:
        killed.append(workers()[0].pid)
        os.kill(killed[0], signal.SIGKILL)

    killing = when(folder, len(before) + 5, kill_one)
    summary = generate_files(source, folder, **how)
    killing.join()
    assert killed and summary.num_rows == NUM_ROWS and summary.num_failed == 0
    assert summary.num_before >= 4 * len(before)  # an actor may have ended one more before it was stopped
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    rows = [json.loads(line) for part in sorted(folder.glob("part-*")) for line in part.read_text().splitlines()]
    assert [row["n"] for row in rows] == [*range(NUM_ROWS)]
    assert [row["reply"] for row in rows] == expected


def test_parquet_with_conversations(cluster: Any, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"What is {n} + 1?"}] for n in range(8)]
    pq.write_table(pa.table({"chat": [*chats, []], "id": [*range(9)]}), tmp_path / "in.parquet", row_group_size=5)
    how: dict[str, Any] = {"sampling": GREEDY, "messages_column": "chat", "unit_rows": 3, **OPTIONS}
    summary = generate_files(tmp_path / "in.parquet", tmp_path / "out", **how)
    assert (summary.num_rows, summary.num_before, summary.num_failed) == (9, 0, 1)
    rows = pq.read_table(tmp_path / "out").to_pylist()
    llm = nv.LLM("tiny", **OPTIONS)
    assert [row["reply"] for row in rows] == [*(llm.chat(chat, GREEDY).text for chat in chats), ""]
    again = generate_files(tmp_path / "in.parquet", tmp_path / "out", **how)
    assert (again.num_rows, again.num_before, again.num_failed) == (9, 9, 1)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="both given"):
        generate_files(tmp_path, tmp_path / "out", prompt_column="a", messages_column="b")
    with pytest.raises(InvalidRequestError, match="concurrency=0"):
        generate_files(tmp_path, tmp_path / "out", concurrency=0)
    with pytest.raises(InvalidRequestError, match="'reply' has the name of a result"):
        generate_files(tmp_path, tmp_path / "out", prompt_column="reply")
