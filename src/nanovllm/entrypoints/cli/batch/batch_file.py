"""The files of a batch: its requests, each a line of JSON, and its results, which later runs go on from.

The form is that of OpenAI's batches (https://platform.openai.com/docs/guides/batch).
"""

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from http.client import OK
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from nanovllm.entrypoints.outputs import naming
from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import check_text

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
SERVER_FAULT = 500  # from this status on, the fault was not the request's
BUSY = (429, 503)
BEGINNING = b'{"id": "batch_req_'  # of a line of results


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """One request of a batch: the name that the file gives it, its route, and its body as it is sent."""

    custom_id: str
    route: str
    body: bytes

    @property
    def digest(self) -> str:
        """A short hash of what is asked, by which a later run knows its results again."""
        return hashlib.sha256(self.route.encode() + b"\0" + self.body).hexdigest()[:16]


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
            raise InvalidRequestError(
                f"{file}:{number}: custom_id {request.custom_id!r} is in line {before} too: each line needs another one"
            )
        found[request.custom_id] = number, request
    return tuple(request for _, request in found.values())


def _request(place: str, line: str) -> BatchRequest:
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{place}: this line is not a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{place}: this line is not a JSON object")
    custom_id, method, route, body = (given.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id or not _is_text(custom_id):
        raise InvalidRequestError(f"{place}: custom_id={custom_id!r} must be a string of whole characters, and not empty")
    if method not in ("POST", None):
        raise InvalidRequestError(f"{place}: method={method!r} must be 'POST'")
    if route not in ROUTES:
        raise InvalidRequestError(f"{place}: url={route!r} must be one of {', '.join(ROUTES)}")
    if not isinstance(body, dict):
        raise InvalidRequestError(f"{place}: body={body!r} must be a JSON object")
    if body.get("stream"):
        raise InvalidRequestError(f"{place}: body.stream is true: a batch has whole replies, so leave stream out")
    return BatchRequest(custom_id=custom_id, route=route, body=json.dumps(body).encode())


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class ResultFile:
    """The file of results, to which one line per request is added, in the order in which they end. A context, which closes the file.

    A file that an earlier run has left is gone on from: a line that was cut off is removed, and so are the results of requests that failed
    by no fault of theirs. While the file is open, no other run can open it.

    Attributes:
        done: The custom ids whose results are in the file.
        num_failed: How many of its results are errors.
    """

    def __init__(self, path: Path, requests: Seq[BatchRequest]) -> None:
        """Open the file, and read what is in it.

        Raises:
            InvalidRequestError: The file cannot be read or written, another run has it open, or it has something else than results of this
                batch.
        """
        self._path, known = path, {request.custom_id: request for request in requests}
        kept, self.done, self.num_failed = [], set[str](), 0
        with naming(path):
            self._file = _opened(path)
        try:
            with naming(path):
                before = self._file.read().splitlines(keepends=True)
            for number, line in enumerate(before, 1):
                if number == len(before) and _cut_off(line):
                    continue
                result = _result(line)
                if result is None:
                    raise InvalidRequestError(f"{path}:{number}: this line is not the result of a batch: give another file")
                asked = known.get(result["custom_id"])
                if asked is None or asked.digest != result.get("request"):
                    what = "has no such request" if asked is None else "asks something else under this name"
                    raise InvalidRequestError(f"{path}:{number}: custom_id {result['custom_id']!r}: the batch {what}: give another file")
                if _settled(result):
                    kept.append(line)
                    self._note(result)
            if len(kept) < len(before):
                with naming(path):
                    self._replace(b"".join(kept))
        except BaseException:
            self._file.close()
            raise

    def _replace(self, data: bytes) -> None:
        """Put a new file with this content in the place of the file, at once, with the same permissions, and open it."""
        place = self._path.resolve()
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}-", delete=False) as made:
            os.fchmod(made.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
            made.write(data)
            made.flush()
            os.fsync(made.fileno())
        old, self._file = self._file, _locked(Path(made.name))  # locked before it has the name
        os.replace(made.name, place)
        old.close()
        self._file.seek(0, os.SEEK_END)

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
        try:
            line = json.dumps(result, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which only JSON's escapes can say
            line = json.dumps(result).encode()
        with naming(self._path):
            self._file.write(line + b"\n")
            self._file.flush()


def _opened(path: Path) -> IO[bytes]:
    """The file, made if it is not there, and locked.

    Raises:
        OSError: It is not a plain file, or another run has it.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a plain file")
    path.touch()
    file = _locked(path)
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # replaced by a run that has just ended
        file.close()
        raise OSError(errno.EAGAIN, "another run writes to it")
    return file


def _locked(path: Path) -> IO[bytes]:
    file = open(path, "r+b")  # noqa: SIM115  # closed by `ResultFile.__exit__`
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OSError(errno.EAGAIN, "another run writes to it") from None
    return file


def _cut_off(line: bytes) -> bool:
    """Whether a file's last line is the beginning of a result, as a run leaves it that was stopped while it wrote."""
    return not line.endswith(b"\n") and (line.startswith(BEGINNING) or BEGINNING.startswith(line))


def _result(line: bytes) -> dict[str, Any] | None:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("custom_id"), str) and "response" in found else None


def _settled(result: dict[str, Any]) -> bool:
    """Whether a result is a reply, or an error that would come again."""
    response: Any = result["response"]
    status = response.get("status_code") if isinstance(response, dict) else None
    return isinstance(status, int) and status < SERVER_FAULT and status not in BUSY
