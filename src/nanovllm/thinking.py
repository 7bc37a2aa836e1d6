"""Think blocks by token id: where they stand, and a chunk without them."""

from typing import Any, Literal

import numpy as np

from .chunks import released
from .compose import MODES, dropped
from .errors import InvalidRequestError
from .model import Model
from .state.chunk import Chunk
from .state.engine_state import EngineState
from .tokenizer import Tokenizer

Retain = Literal["all", "recompute", "shift", "gap"]


def check_retain(model: Model, retain: Any) -> None:
    """Raise `InvalidRequestError` for what is not `"all"` or a mode of `drop`, and for a model that has no think tokens to drop."""
    if retain == "all":
        return
    if retain not in MODES:
        raise InvalidRequestError(f"retain={retain!r} is not one of all, {', '.join(MODES)}")
    if model.tokenizer is None or model.tokenizer.think_token_ids is None:
        raise InvalidRequestError(f'retain={retain!r} drops think blocks, and {model.name} has no think tokens: only "all" works')


def think_spans(tokenizer: Tokenizer, token_ids: np.ndarray, start: int = 0) -> list[tuple[int, int]]:
    """The think blocks that end behind token `start`, as (begin, end), in order; one that is not closed ends with the tokens.

    A block goes with the white space behind it: templates leave both out of a conversation's history. One may begin before `start`, where
    the prompt opened it.
    """
    if tokenizer.think_token_ids is None:
        return []
    opening, closing = tokenizer.think_token_ids
    spans, begin = [], None
    for at in np.flatnonzero((token_ids == opening) | (token_ids == closing)).tolist():
        if token_ids[at] == opening:
            begin = at if begin is None else begin
        elif begin is not None:
            spans.append((begin, _behind_space(tokenizer, token_ids, at + 1)))
            begin = None
    if begin is not None:
        spans.append((begin, len(token_ids)))
    return [span for span in spans if span[1] > start]


def without_thinking(
    model: Model, state: EngineState, chunk: Chunk, start: int, retain: Retain, taken: list[int]
) -> tuple[EngineState, Chunk]:
    """A chunk in the place of `chunk`, without the think blocks behind token `start`; nothing is committed. Pages taken go into `taken`."""
    if retain == "all" or model.tokenizer is None:
        return state, chunk
    for begin, end in reversed(think_spans(model.tokenizer, chunk.token_ids, start)):
        if (begin, end) == (0, len(chunk)):
            break
        state, kept = dropped(model, state, chunk, begin, end, retain, taken)
        state, chunk = released(state, chunk), kept
    return state, chunk


def _behind_space(tokenizer: Tokenizer, token_ids: np.ndarray, at: int) -> int:
    while at < len(token_ids) and not tokenizer.decode([int(token_ids[at])], skip_special_tokens=False).strip():
        at += 1
    return at
