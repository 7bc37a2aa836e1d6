"""`Piece` and `Stream`: a reply while it is generated."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from nanovllm.state.html import card
from nanovllm.state.logprobs import TokenLogprobs
from nanovllm.state.request import RequestOutput
from nanovllm.types import brief_fields

SHOWN_EVERY = 0.05  # seconds between two pictures of a reply in a notebook


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A part of a streamed reply.

    `text` may be empty while a character, or the start of a possible stop string, is incomplete.

    Attributes:
        text: The new text. The texts of all pieces together are the reply.
        token_ids: The new tokens.
        finish_reason: "stop" or "length" in the last piece, otherwise None. A reply that fails ends with an exception.
        output: In the last piece the result that `generate` would return, otherwise None.
        logprobs: The log-probabilities of `token_ids`, or None if they were not asked for.

    Examples:
        >>> llm = nv.LLM(model, num_pages=64)
        >>> *_, last = llm.stream("Hello", nv.SamplingParams(temperature=0, max_tokens=12))
        >>> last.finish_reason, last.output.text
        ('stop', '! How can I help you?')
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None

    def __repr__(self) -> str:
        return brief_fields(self)


class Stream(Iterator[Piece]):
    """An iterator of the pieces of one reply, which a notebook shows as it grows.

    Examples:
        >>> llm = nv.LLM(model, num_pages=64)
        >>> stream = llm.stream("Hello", nv.SamplingParams(temperature=0, max_tokens=12))
        >>> "".join(piece.text for piece in stream)
        '! How can I help you?'
    """

    def __init__(self, pieces: Generator[Piece, None, None]) -> None:
        """Make a stream. `LLM.stream` does.

        Args:
            pieces: The pieces of the reply.

        Examples:
            >>> stream = nv.Stream(nv.Piece(text=word, token_ids=[]) for word in ("Once", " more"))
            >>> [piece.text for piece in stream]
            ['Once', ' more']
        """
        self._pieces, self._text = pieces, ""
        self._output: RequestOutput | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self._text, self._output = self._text + piece.text, piece.output
        return piece

    def close(self) -> None:
        """Cancel the reply if it has not ended.

        Examples:
            >>> llm = nv.LLM(model, num_pages=64)
            >>> stream = llm.stream("Hello", nv.SamplingParams(max_tokens=12))
            >>> stream.close()
            >>> list(stream)
            []
        """
        self._pieces.close()

    def _ipython_display_(self) -> None:
        """Read the rest, and show the reply meanwhile. If the reader is interrupted or an error comes, what has come stays."""
        from IPython.display import DisplayHandle  # only a notebook calls this

        shown, due = DisplayHandle(), 0.0
        shown.display(self._bundle(), raw=True)
        try:
            for _ in self:
                if (now := time.perf_counter()) >= due:
                    shown.update(self._bundle(), raw=True)
                    due = now + SHOWN_EVERY
        finally:
            shown.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, Any]:
        """The reply so far, as text and as HTML."""
        html = card("Reply", [], self._text) if self._output is None else self._output._repr_html_()
        return {"text/plain": self._text, "text/html": html}
