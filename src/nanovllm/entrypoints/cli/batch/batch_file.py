"""The files of a batch: its requests, each a line of JSON, and its results, which later runs go on from.

The form is that of OpenAI's batches (https://platform.openai.com/docs/guides/batch).
"""

import json
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from http.client import OK
from pathlib import Path
from types import TracebackType
from typing import Any

from nanovllm.entrypoints.outputs import naming
from nanovllm.errors import InvalidRequestError
from nanovllm.files import write_whole
from nanovllm.tokenizer.tokenizer import check_text

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
SERVER_FAULT = 500  # from this status on, the fault was not the request's


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One request of a batch: the name that the file gives it, its route, and its body as it is sent."""

    custom_id: str
    route: str
    body: bytes


def read_requests(file: Path) -> tuple[BatchRequest, ...]:
    """The requests of a file. Empty lines are skipped.

    Raises:
        InvalidRequestError: The file cannot be read, or a line is not a request; the message has the line's number.

    Examples:
        >>> line = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}'
        >>> _ = Path("in.jsonl").write_text(line + "\\n")
        >>> read_requests(Path("in.jsonl"))[0].custom_id
        'a'
    """
    try:
        lines = check_text(file.read_bytes()).split("\n")
    except OSError as error:
        raise InvalidRequestError(f"{file}: {error.strerror}") from None
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{file}: {error}") from None
    found: dict[str, tuple[int, BatchRequest]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _request(f"{file}:{number}", line)
        if request.custom_id in found:
            before = found[request.custom_id][0]
            raise InvalidRequestError(f"{file}:{number}: custom_id {request.custom_id!r} is that of line {before}: each needs its own")
        found[request.custom_id] = number, request
    return tuple(request for _, request in found.values())


def _request(place: str, line: str) -> BatchRequest:
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{place}: this is no JSON object: {error}") from None
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{place}: this is no JSON object")
    custom_id, method, route, body = (given.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequestError(f"{place}: custom_id={custom_id!r} must be a string, and not empty")
    if method not in ("POST", None):
        raise InvalidRequestError(f"{place}: method={method!r} must be 'POST'")
    if route not in ROUTES:
        raise InvalidRequestError(f"{place}: url={route!r} must be one of {', '.join(ROUTES)}")
    if not isinstance(body, dict):
        raise InvalidRequestError(f"{place}: body={body!r} must be a JSON object")
    if body.get("stream"):
        raise InvalidRequestError(f"{place}: body.stream is true: a batch has whole replies, so leave stream out")
    return BatchRequest(custom_id=custom_id, route=route, body=json.dumps(body).encode())


class ResultFile:
    """The file of results, to which one line per request is added, in the order in which they end. A context, which closes the file.

    A file that an earlier run has left is gone on from: a line that was cut off is removed, and so are the results of requests that failed
    by no fault of theirs.

    Attributes:
        done: The custom ids whose results are in the file.
        num_failed: How many of its results are errors.
    """

    def __init__(self, path: Path, requests: Seq[BatchRequest]) -> None:
        """Open the file, and read what is in it.

        Raises:
            InvalidRequestError: The file cannot be read or written, or it has the results of another batch.
        """
        self._path, known = path, {request.custom_id for request in requests}
        kept, self.done, self.num_failed = [], set[str](), 0
        with naming(path):
            before = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            for number, line in enumerate(before, 1):
                result = _result(line)
                if result is None and number < len(before):
                    raise InvalidRequestError(f"{path}:{number}: this is no result of a batch: give another file")
                if result is None or not line.endswith(b"\n"):
                    continue  # the last line of a run that was stopped
                if result["custom_id"] not in known:
                    raise InvalidRequestError(f"{path}:{number}: the batch has no custom_id {result['custom_id']!r}: give another file")
                if _settled(result):
                    kept.append(line)
                    self._note(result)
            if len(kept) < len(before):
                write_whole(path, b"".join(kept))
            self._file = open(path, "ab")  # noqa: SIM115  # closed by `__exit__`

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with naming(self._path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _note(self, result: dict[str, Any]) -> None:
        self.done.add(result["custom_id"])
        self.num_failed += result["response"] is None or result["response"]["status_code"] != OK

    def add(self, result: dict[str, Any]) -> None:
        """Add a line. It reaches the system at once, so that a program that is killed loses nothing that has ended."""
        self._note(result)
        with naming(self._path):
            self._file.write(json.dumps(result, ensure_ascii=False).encode() + b"\n")
            self._file.flush()


def _result(line: bytes) -> dict[str, Any] | None:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("custom_id"), str) and "response" in found else None


def _settled(result: dict[str, Any]) -> bool:
    """Whether a result is a reply, or an error that would come again."""
    response: Any = result["response"]
    return isinstance(response, dict) and isinstance(response.get("status_code"), int) and response["status_code"] < SERVER_FAULT
