"""`generate_files`: the rows of files answered by several engines, with progress, and gone on from after a stop."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.ray.batch_generator import BatchGenerator
from nanovllm.entrypoints.ray.batch_rows import COLUMNS, ERROR
from nanovllm.entrypoints.ray.batch_units import as_text, begin, failed_rows, from_text, make_plan, read_rows, results_of, write_part
from nanovllm.entrypoints.ray.require import gpus_of, require_ray
from nanovllm.errors import InvalidRequestError
from nanovllm.files import as_path
from nanovllm.sampling.params import SamplingParams

UNIT_ROWS = 256
AT_ONCE = 2  # units that one engine has, so that it is not idle while the last rows of one of them end
PER_BLOCK = 16  # units that Ray hands out together, at most: so many are told of at once
EVEN = 64  # blocks of each engine, at least, if there are so many units: the work is divided evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run has done.

    Attributes:
        num_rows: The rows of the input. All have results.
        num_before: How many of them earlier runs had answered.
        num_failed: How many of them have an error.
    """

    num_rows: int
    num_before: int
    num_failed: int


class UnitWorker:
    """What Ray Data makes in each actor: an engine that answers units, and writes their parts."""

    def __init__(self, folder: str, suffix: str, columns: Sequence[str], model: str, options: dict[str, Any]) -> None:
        self._folder, self._suffix, self._columns = Path(folder), suffix, columns
        self._generate = BatchGenerator(model, **options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer units. Returns the number of rows of each, and how many have an error."""
        done = [self._answer(str(part), str(text)) for part, text in zip(batch["part"], batch["unit"], strict=True)]
        return {"rows": [rows for rows, _ in done], "failed": [failed for _, failed in done]}

    def _answer(self, name: str, text: str) -> tuple[int, int]:
        unit, part = from_text(text), self._folder / name
        if part.exists():  # by a worker that was lost before it could say so
            return unit.rows, failed_rows(part)
        rows = read_rows(unit)
        results = results_of(rows, self._generate, self._columns)
        write_part(part, unit, rows, results)
        return unit.rows, sum(error is not None for error in results[ERROR])


def generate_files(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    model: str = "tiny",
    sampling: SamplingParams | None = None,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    sampling_column: str | None = None,
    enable_thinking: bool = True,
    concurrency: int = 1,
    num_gpus: float | None = None,
    unit_rows: int = UNIT_ROWS,
    progress: bool | None = None,
    **options: Any,
) -> Summary:
    """Generate replies to all rows of files, by several engines on Ray.

    The results of `unit_rows` rows become a file `part-*` in the output folder, once all of them have ended. Parts have the rows of the
    input in their order, with the columns that `BatchGenerator` adds. If the run is stopped, the same call goes on with the rows that are
    in no part: none is in the output twice, and none is lost. If an engine dies, Ray starts another one, which runs its units again.

    Args:
        inputs: A file, a folder or a list of them: JSON lines (`.jsonl`) or Parquet (`.parquet`). All machines must see them.
        output: A folder for the results, which all machines must see.
        model: As in `LLM`. Every machine needs it under this name.
        sampling: As in `BatchGenerator`, and so are the next four.
        prompt_column: The column of prompts.
        messages_column: The column of conversations.
        sampling_column: The column of options of a row.
        enable_thinking: As in `LLM.chat`.
        concurrency: How many engines there are.
        num_gpus: The GPUs of one engine. None: as many as `tensor_parallel_size` says, or one; none with `device="cpu"`.
        unit_rows: How many rows a part has at most. Fewer are lost by a stop; more keep an engine better filled.
        progress: Whether a bar of the rows is drawn on stderr. None: on a terminal.
        **options: The options of `LLM`.

    Returns:
        How many rows there are.

    Raises:
        InvalidRequestError: Ray is not installed, an argument is invalid, or the folder has the output of another input or other options.
        ray.exceptions.RayError: An engine could not be made, or has failed. The parts stay.

    References:
        https://docs.ray.io/en/latest/data/batch_inference.html

    Examples:
        >>> _ = Path("in.jsonl").write_text('{"prompt": "The cat"}\\n{"prompt": "Once upon a time"}\\n')
        >>> greedy = SamplingParams(temperature=0, max_tokens=8, stop=".")
        >>> generate_files("in.jsonl", "out", sampling=greedy, concurrency=2, device="cpu", num_pages=64)  # doctest: +SKIP
        Summary(num_rows=2, num_before=0, num_failed=0)
    """
    require_ray("pyarrow", "pandas")
    import ray.data
    from tqdm import tqdm

    if prompt_column is not None and messages_column is not None:
        raise InvalidRequestError("prompt_column and messages_column are both given: a row has a prompt or a conversation")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidRequestError(f"concurrency={concurrency!r} must be an integer of at least 1")
    given = [inputs] if isinstance(inputs, str | os.PathLike) else [*inputs]
    folder, gpus = as_path(output).resolve(), gpus_of(options, num_gpus)
    columns = [name for name in (messages_column or prompt_column or "prompt", sampling_column) if name is not None]
    if taken := [name for name in columns if name in COLUMNS]:
        raise InvalidRequestError(f"the column {taken[0]!r} has the name of a result: rename it")
    asked = {
        "model": str(model),
        "sampling": repr(sampling),
        "columns": repr((prompt_column, messages_column, sampling_column)),
        "enable_thinking": str(enable_thinking),
    }
    plan = make_plan([as_path(path) for path in given], unit_rows, asked)
    todo = begin(folder, plan)
    before = plan.num_rows - sum(unit.rows for unit in todo)
    waiting = {unit.number for unit in todo}
    failed = sum(failed_rows(plan.part(folder, unit)) for unit in plan.units if unit.number not in waiting)
    with tqdm(total=plan.num_rows, initial=before, desc="rows", unit="row", disable=None if progress is None else not progress) as bar:
        if todo:
            how = {"sampling": sampling, "prompt_column": prompt_column, "messages_column": messages_column}
            how |= {"sampling_column": sampling_column, "enable_thinking": enable_thinking, **options}
            items = [{"part": plan.part(folder, unit).name, "unit": as_text(unit)} for unit in todo]
            engines = ray.data.ActorPoolStrategy(
                size=min(concurrency, len(todo)), max_concurrent_calls_per_actor=AT_ONCE, enable_true_multi_threading=True
            )
            blocks = min(len(items), max(EVEN * concurrency, len(items) // PER_BLOCK))
            done = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
                UnitWorker,
                batch_size=1,
                compute=engines,
                num_gpus=gpus,
                fn_constructor_args=(str(folder), plan.suffix, columns, model, how),
            )
            done.context.enable_progress_bars = False  # this bar is enough
            for row in done.iter_rows():
                bar.update(row["rows"])
                failed += row["failed"]
    return Summary(num_rows=plan.num_rows, num_before=before, num_failed=failed)
