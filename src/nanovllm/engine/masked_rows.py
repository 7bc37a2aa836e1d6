"""`MaskedRows`: rows whose next tokens are masked: what does not change while the same requests run, and where their matchers stand."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.sampling.matchers import Matcher, Matchers, NotAllowedError
from nanovllm.sampling.process_logits import blame
from nanovllm.state.request import Request
from nanovllm.types import Int32, Int64

NEVER = 1 << 62  # tokens that no reply has


class MaskedRows:
    """Masked rows of a batch: by grammars, by `min_tokens` or by `bad_words`. Mutable: their matchers follow the replies.

    As long as nobody else asks for a matcher, the matchers are where this object left them, and no reply has to be looked at.

    Attributes:
        rows: The indices of the rows in the batch.
        requests: Their requests.
        index: The same as `rows`.
        most: For each the most tokens of its reply.
        bound: The places, in `requests`, of those with grammars.
        free: The places of the others.
        picky: The places of those with `min_tokens` or `bad_words`.
        least: For each row in `bound` after how many tokens one of them may end the reply.
    """

    __slots__ = ("_lengths", "_matchers", "_newest", "_turn", "bound", "free", "index", "least", "most", "picky", "requests", "rows")

    def __init__(self, rows: Seq[int], requests: Seq[Request]) -> None:
        """Take the indices of the rows, and their requests."""
        self.rows, self.requests, self.index = tuple(rows), tuple(requests), np.array(rows, np.intp)
        self.most = np.array([request.max_len - request.num_prompt for request in requests], np.int64)
        self.bound = [place for place, request in enumerate(requests) if request.grammar is not None]
        self.free = [place for place, request in enumerate(requests) if request.grammar is None]
        self.picky = [place for place, request in enumerate(requests) if request.sampling.min_tokens or request.bad_words is not None]
        self.least = np.array([_least(requests[place]) for place in self.bound], np.int64)
        self._turn, self._matchers = -1, list[Matcher]()
        self._lengths, self._newest = np.empty(0, np.int64), np.empty(0, np.int32)

    def follow(
        self, matchers: Matchers, lengths: Int64[np.ndarray, "n"], newest: Int32[np.ndarray, "n"], reply: Callable[[int, int], list[int]]
    ) -> list[Matcher]:
        """Move the matchers of the rows in `bound` to the ends of their replies.

        Args:
            matchers: The matchers of the engine.
            lengths: The number of tokens of each reply.
            newest: The newest token of each row.
            reply: The tokens of the reply of the row with an index, from a place on.

        Returns:
            The matchers, in the order of `bound`.
        """
        if self._turn == matchers.turn and np.array_equal(self._lengths, lengths) and np.array_equal(self._newest, newest):
            return self._matchers
        self._turn, self._matchers = -1, []
        for place in self.bound:
            request, row = self.requests[place], self.rows[place]
            assert request.grammar is not None
            matcher = matchers.of(request, request.grammar)
            try:
                matcher.follow(int(lengths[place]), lambda start, row=row: reply(row, start))
            except Exception as error:
                self.failed(matchers, place, error)
                raise
            self._matchers.append(matcher)
        self._turn, self._lengths, self._newest = matchers.turn, lengths, newest
        return self._matchers

    def read(self, matchers: Matchers, tokens: Seq[int]) -> dict[int, NotAllowedError | None]:
        """Let the matchers read one more token each, after `follow`.

        Args:
            matchers: The matchers of the engine.
            tokens: The tokens of all rows of the batch.

        Returns:
            For each row that ends with its token None, because its reply is complete, or why the token cannot be in a reply.
        """
        turn, ends = self._turn, dict[int, NotAllowedError | None]()
        self._turn = -1  # an interrupt leaves some matchers behind others
        for place, matcher in zip(self.bound, self._matchers, strict=True):
            row = self.rows[place]
            try:
                if matcher.read(tokens[row]):
                    ends[row] = None
            except NotAllowedError as error:
                matchers.forget(self.requests[place])
                ends[row] = error
        self._turn, self._lengths, self._newest = turn, self._lengths + 1, np.array([tokens[row] for row in self.rows], np.int32)
        return ends

    def failed(self, matchers: Matchers, place: int, error: Exception) -> None:
        """Note that an exception belongs to a request, and drop its matcher."""
        request = self.requests[place]
        matchers.forget(request)
        blame(error, f"in its grammar {request.sampling.grammar!r}", None, (request.request_id,))


def _least(request: Request) -> int:
    ends = request.grammar is not None and not request.grammar.end_ids.isdisjoint(request.stop_ids)
    return request.sampling.min_tokens if ends else NEVER
