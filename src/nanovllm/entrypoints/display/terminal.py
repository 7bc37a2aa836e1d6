"""Replies on a terminal: think blocks are dimmed, empty ones are left out, and control characters are replaced."""

import os
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from nanovllm.tokenizer.stream import held_back

OPEN, CLOSE = "<think>", "</think>"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except tab and newline, because a reply must not control the terminal


def is_terminal(stream: Any) -> bool:
    """Whether the stream is a terminal that can show styles."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def dim(text: str) -> str:
    """The text in a terminal's dim style."""
    return f"\x1b[2m{text}\x1b[0m" if text else ""


def note(text: str) -> None:
    """Print a line on stderr, dimmed on a terminal."""
    print(dim(text) if is_terminal(sys.stderr) else text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The display state of a reply on a terminal.

    Attributes:
        styled: Whether think blocks are dimmed; otherwise they are printed like other text.
        clean: Whether control characters are replaced.
        inside: Whether the text is inside a think block.
        fresh: Whether nothing of the current block was printed yet.
        held: Text that is held back: a possible part of a tag, or white space that may end a block.
    """

    styled: bool
    clean: bool
    inside: bool = False
    fresh: bool = True
    held: str = ""

    @staticmethod
    def of(stream: Any, *, chat_prompt: str | None = None) -> "View":
        """The view of a reply on a stream. A chat prompt may already have opened the think block."""
        terminal = is_terminal(stream)
        inside = chat_prompt is not None and chat_prompt.rstrip().endswith(OPEN)
        return View(styled=terminal and chat_prompt is not None, clean=stream.isatty(), inside=inside)

    def push(self, text: str) -> "tuple[View, str]":
        """The view after more text, and the text to print."""
        if not self.styled:
            return self, CONTROL.sub("\ufffd", text) if self.clean else text
        view, rest, shown = self, self.held + text, ""
        while True:
            tag = CLOSE if view.inside else OPEN
            block, matched, after = rest.partition(tag)
            view, piece = view._show(block, whole=bool(matched))
            shown += piece
            if not matched:
                return view, shown
            if view.inside and not view.fresh:
                shown += "\n\n"
            view, rest = replace(view, inside=not view.inside, fresh=True, held=""), after

    def end(self) -> str:
        """The rest to print at the end of the reply."""
        return "" if self.inside else CONTROL.sub("\ufffd", self.held)

    def _show(self, text: str, *, whole: bool) -> "tuple[View, str]":
        """The view after text of one block, and the text to print. `whole`: the block ends with it."""
        if self.fresh:
            text = text.lstrip()
        keep = 0 if whole else held_back(text, (CLOSE if self.inside else OPEN,))
        body, held = text[: len(text) - keep], text[len(text) - keep :]
        if self.inside or whole:  # white space at the end of a think block, or before one, is printed only if text follows
            stripped = body.rstrip()
            body, held = stripped, body[len(stripped) :] + held
        clean = CONTROL.sub("\ufffd", body)
        view = replace(self, held="" if whole else held, fresh=self.fresh and not body)
        return view, dim(clean) if self.inside else clean


def clean(text: str) -> str:
    """A name on one line, without control characters."""
    return CONTROL.sub("\ufffd", " ".join(text.split())).encode("utf-8", "replace").decode()


def bar(total: int, what: str, unit: str, *, progress: bool | None = None) -> "tqdm[Any]":
    """A progress bar over `total` steps, for a `with` block. `progress`: None draws it only if stderr is a terminal."""
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(total=total, desc=what, unit=unit, disable=not shown, leave=False, dynamic_ncols=True)
