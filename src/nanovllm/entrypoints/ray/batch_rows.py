"""Rows of a batch as prompts, and replies as columns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.request import RequestOutput

REPLY, REPLY_IDS, REASON, ERROR = COLUMNS = ("reply", "reply_token_ids", "finish_reason", "error")


def plain(value: Any) -> Any:
    """A value of a column as Python has it: arrays as lists, at any depth, and keys without a value left out.

    Formats that have one type for all rows of a column, such as Parquet, give each message all keys that any message has.

    Examples:
        >>> plain(np.array([{"role": "user", "content": np.str_("Hello"), "name": None}], object))
        [{'role': 'user', 'content': 'Hello'}]
    """
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items() if one is not None}
    return value.item() if isinstance(value, np.generic) else value


def rows_of(batch: Mapping[str, Any], column: str) -> list[Any]:
    """The values of a column, row by row.

    Raises:
        InvalidRequestError: There is no such column, or the batch has a column of a name that the results get.
    """
    if taken := [name for name in COLUMNS if name in batch]:
        raise InvalidRequestError(f"the rows have a column {taken[0]!r}, which is the name of a result: rename it")
    if column not in batch:
        raise InvalidRequestError(f"the rows have no column {column!r}: there are {', '.join(map(repr, batch))}")
    return [plain(value) for value in batch[column]]


def with_changes(params: SamplingParams, changes: Any) -> SamplingParams:
    """Sampling options with those of one row in their place.

    Raises:
        InvalidRequestError: An option is unknown or invalid.

    Examples:
        >>> with_changes(SamplingParams(temperature=0), {"max_tokens": 3}).max_tokens
        3
    """
    if changes is None:
        return params
    if not isinstance(changes, Mapping):
        raise InvalidRequestError(f"the options of a row must be a mapping, not {type(changes).__name__}")
    unknown = [name for name in changes if name not in SamplingParams.__dataclass_fields__]
    if unknown:
        raise InvalidRequestError(f"a row has the option {unknown[0]!r}, which is none of SamplingParams")
    try:
        return replace(params, **changes)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the options of a row are invalid: {error}") from None


def columns_of(results: Sequence[RequestOutput | Exception]) -> dict[str, Any]:
    """The columns of results, in the order of their rows.

    Args:
        results: An output for each row, or the error that kept it from running.

    Returns:
        `reply`, `reply_token_ids`, `finish_reason` and `error`, which is None for a row that has ended well. A row that failed while it ran
        has what it had until then.
    """
    outputs = [result if isinstance(result, RequestOutput) else None for result in results]
    errors = [result if isinstance(result, Exception) else result.error for result in results]
    return {
        REPLY: ["" if output is None else output.text for output in outputs],
        REPLY_IDS: [[] if output is None else [*map(int, output.token_ids)] for output in outputs],
        REASON: ["error" if output is None else output.finish_reason for output in outputs],
        ERROR: [None if error is None else f"{type(error).__name__}: {error}" for error in errors],
    }
