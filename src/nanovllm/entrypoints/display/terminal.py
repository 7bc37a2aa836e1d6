"""What a terminal gets to see of a reply: think blocks dimmed, empty ones left out, control characters made harmless."""

import os
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from nanovllm.tokenizer.stream import held_back

OPEN, CLOSE = "<think>", "</think>"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline: a reply must not steer the terminal


def is_terminal(stream: Any) -> bool:
    """Whether the stream is a terminal that styles can be shown on."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def dim(text: str) -> str:
    """The text in a terminal's dim style."""
    return f"\x1b[2m{text}\x1b[0m" if text else ""


def note(text: str) -> None:
    """A line for the reader, on stderr, dimmed where that is a terminal."""
    print(dim(text) if is_terminal(sys.stderr) else text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A reply under way on a terminal. `held` is text that may be part of a tag, or space before something that is not there yet.

    `fresh`: nothing of the current block was shown. Without `styled`, think blocks are shown as they are; without `clean`, everything is.
    """

    styled: bool
    clean: bool
    inside: bool = False
    fresh: bool = True
    held: str = ""

    @staticmethod
    def of(stream: Any, *, chat_prompt: str | None = None) -> "View":
        """The view of a reply on a stream. A chat's prompt, special tokens included, may have opened the think block itself."""
        terminal = is_terminal(stream)
        inside = chat_prompt is not None and chat_prompt.rstrip().endswith(OPEN)
        return View(styled=terminal and chat_prompt is not None, clean=stream.isatty(), inside=inside)

    def push(self, text: str) -> "tuple[View, str]":
        """The view after more text, and what to print of it."""
        if not self.styled:
            return self, CONTROL.sub("\ufffd", text) if self.clean else text
        view, rest, shown = self, self.held + text, ""
        while True:
            tag = CLOSE if view.inside else OPEN
            block, found, after = rest.partition(tag)
            view, piece = view._show(block, whole=bool(found))
            shown += piece
            if not found:
                return view, shown
            if view.inside and not view.fresh:
                shown += "\n\n"
            view, rest = replace(view, inside=not view.inside, fresh=True, held=""), after

    def end(self) -> str:
        """What is left to print when the reply has ended."""
        return "" if self.inside else CONTROL.sub("\ufffd", self.held)

    def _show(self, text: str, *, whole: bool) -> "tuple[View, str]":
        if self.fresh:
            text = text.lstrip()
        keep = 0 if whole else held_back(text, (CLOSE if self.inside else OPEN,))
        body, held = text[: len(text) - keep], text[len(text) - keep :]
        if self.inside or whole:  # space at the end of a thought, or before one, is shown only if more of it follows
            stripped = body.rstrip()
            body, held = stripped, body[len(stripped) :] + held
        clean = CONTROL.sub("\ufffd", body)
        view = replace(self, held="" if whole else held, fresh=self.fresh and not body)
        return view, dim(clean) if self.inside else clean


def clean(text: str) -> str:
    """A name on one line, which cannot steer a terminal."""
    return CONTROL.sub("\ufffd", " ".join(text.split())).encode("utf-8", "replace").decode()


def bar(total: int, what: str, unit: str, *, progress: bool | None = None) -> "tqdm[Any]":
    """A bar over `total` steps, to be used in a `with` block. `progress`: None draws it only where stderr is a terminal."""
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(total=total, desc=what, unit=unit, disable=not shown, leave=False, dynamic_ncols=True)
