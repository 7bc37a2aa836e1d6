"""What a run has found so far: with a file, on disk after every workload, so that a run which is cut keeps what it measured."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.cli.bench.environment import commit, record
from nanovllm.entrypoints.display.terminal import note
from nanovllm.files import write_whole
from nanovllm.models.model import Model


class Journal:
    """One run's JSON object while it grows; `unfinished` stands in it until `end`.

    Lines of progress go to stderr for who waits at a terminal, and where a file is written, since a log may be all that is left of a run.
    """

    def __init__(self, model: Model, command: str, at: str | None = None, path: Path | None = None):
        """`at` is the commit, None: as git says now; `path` is the file."""
        self._model, self._command, self._at = model, command, at or commit()
        self._path = None if path is None else path.resolve()  # what a link points to is replaced, not the link
        self._figures: dict[str, Any] = {"unfinished": True}

    @property
    def result(self) -> dict[str, Any]:
        """The object as it stands."""
        return record(self._model, self._figures, self._command, self._at)

    def set(self, figures: Mapping[str, Any]) -> None:
        """Figures that are no workload's: they are written with the next that is, so that no older file is replaced by nothing."""
        self._figures |= figures

    def add(self, figures: Mapping[str, Any]) -> None:
        """More figures, or new values of some."""
        self.set(figures)
        self._write()

    def end(self) -> dict[str, Any]:
        """All was run. Returns the whole object."""
        del self._figures["unfinished"]
        self._write()
        return self.result

    def tell(self, what: str) -> None:
        """Where the run stands."""
        if self._path is not None or sys.stderr.isatty():
            note(what)

    def _write(self) -> None:
        if self._path is not None:  # the name never stands for half of an object
            write_whole(self._path, (json.dumps(self.result, indent=2) + "\n").encode())
