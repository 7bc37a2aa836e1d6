"""The figures of a run so far. They are written to disk after every workload, so that an interrupted run keeps its figures."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.cli.bench.environment import commit, record
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.outputs import naming
from nanovllm.files import write_whole
from nanovllm.models.model import Model


class Journal:
    """The growing JSON object of one run. It has the key `unfinished` until `end`.

    Progress goes to stderr at a terminal. It also goes to stderr if a file is written, because a log may outlive an interrupted run.
    """

    def __init__(self, model: Model, command: str, at: str | None = None, path: Path | None = None):
        """Begin a run. `at` is the commit; None asks git. `path` is the file to write, or None."""
        self._model, self._command, self._at = model, command, at or commit()
        self._path = None if path is None else path.resolve()  # replace the target of a symbolic link, not the link
        self._figures: dict[str, Any] = {"unfinished": True}

    @property
    def result(self) -> dict[str, Any]:
        """The object so far."""
        return record(self._model, self._figures, self._command, self._at)

    def set(self, figures: Mapping[str, Any]) -> None:
        """Add facts that do not belong to a workload.

        The file is written with the next workload, so that an older file is not replaced by one without figures.
        """
        self._figures |= figures

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add or replace figures, and write the file."""
        self.set(figures)
        self._write()

    def end(self) -> dict[str, Any]:
        """Mark the run as finished and write the file. Returns the whole object."""
        del self._figures["unfinished"]
        self._write()
        return self.result

    def tell(self, what: str) -> None:
        """Print one line of progress."""
        if self._path is not None or sys.stderr.isatty():
            note(what)

    def _write(self) -> None:
        if self._path is not None:  # atomically: a reader never sees half of an object
            with naming(self._path):
                write_whole(self._path, (json.dumps(self.result, indent=2) + "\n").encode())
