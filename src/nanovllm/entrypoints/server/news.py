"""Whose a request of the engine is, and what one step gave to one front end."""

from array import array
from dataclasses import dataclass
from typing import Any

from nanovllm.entrypoints.server import scores
from nanovllm.entrypoints.server.engine_metrics import Timeline
from nanovllm.entrypoints.server.peer import Peer
from nanovllm.entrypoints.server.wire import Ended, Keep, Scored, Stepped
from nanovllm.errors import NanoVLLMError
from nanovllm.state.request import StepOutput


@dataclass(slots=True)
class Owner:
    """Whose a request of the engine is: the front end, its number there, whether it is streamed, and its waiting prompt tokens;
    what becomes a chunk at its end, when things happened to it, whose KV it shares, and whether it has given nothing yet.
    """

    peer: Peer
    number: int
    streamed: bool
    waiting: int
    keep: Keep | None
    line: Timeline
    namespace: int
    fresh: bool = True

    @property
    def counted(self) -> bool:
        """Whether metrics count the request: it does more than to make a chunk."""
        return self.keep is None or self.keep.what != "prompt"


class News:
    """What one step gave to one front end."""

    __slots__ = ("counts", "ended", "ids", "peer", "scored", "token_ids")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.ids, self.counts, self.token_ids = array("I"), bytearray(), array("i")
        self.ended: list[Ended] = []
        self.scored: dict[int, Scored] = {}

    def add(self, owner: Owner, out: StepOutput, kept: Any = None, failed: NanoVLLMError | None = None) -> None:
        """Add what the step gave to one request; the chunk that it became, or why it became none; and why the request failed, if it did."""
        if owner.streamed and out.output is None:  # the last tokens may be a stop string's; the end has the whole text
            self.ids.append(owner.number)
            self.counts.append(len(out.token_ids))
            self.token_ids.extend(out.token_ids)
            if out.scored is not None and (scored := scores.of_step(out.scored, len(out.token_ids))) is not None:
                self.scored[owner.number] = scored
        if (output := out.output) is not None:
            if isinstance(kept, NanoVLLMError):
                failed, kept = (kept, None) if owner.keep is not None and owner.keep.what == "prompt" else (failed, {"error": str(kept)})
            error = None if failed is None else (type(failed).__name__, str(failed))
            tokens = array("i", out.token_ids if owner.streamed else output.token_ids).tobytes()
            counts = output.num_cached_tokens, tokens, len(output.token_ids)
            scored = scores.of_step(out.scored, len(out.token_ids)) if owner.streamed else scores.of_entries(output.logprobs)
            more = error, kept, scored, output.out_of_pages
            self.ended.append(Ended(owner.number, output.finish_reason, output.text, *counts, *more))

    def message(self) -> Stepped:
        """The frame's message."""
        return Stepped(self.ids.tobytes(), bytes(self.counts), self.token_ids.tobytes(), self.ended, self.scored)
