"""What a request attends to: from a chunk, a text, token ids, or a list of these, to one run of tokens after at most one chunk."""

import reprlib
from array import array
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nanovllm.engine.donation import require_live
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.vector import IntVector

Context: TypeAlias = "Chunk | str | list[Any] | tuple[Any, ...] | np.ndarray"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolved:
    """All tokens of a context, and the chunk whose KV its beginning is (None: nothing is filled)."""

    tokens: IntVector
    base: Chunk | None


def resolve(model: Model, state: EngineState, context: Context) -> Resolved:
    """The tokens of a context. A start token is added only where nothing stands before.

    Raises `InvalidRequestError` for an empty context, text that is not valid Unicode, ids outside the vocabulary, or a chunk after the
    first place; `ReleasedChunkError` and `ForeignChunkError` for a chunk that cannot be used here.
    """
    parts = parts_of(context)
    base: Chunk | None = None
    runs: list[np.ndarray] = []
    for place, part in enumerate(parts):
        if isinstance(part, Chunk):
            if place:
                raise InvalidRequestError(f"the context has a chunk at place {place}; only its first part may be one (compose joins them)")
            require_live(state, part)
            base = part
        elif isinstance(part, str):
            runs.append(encode(model, part, first=base is None and not any(map(len, runs))))
        else:
            runs.append(token_array(part, model.config.vocab_size, f"part {place} of the context" if len(parts) > 1 else ""))
    new = runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.int32), *runs])
    tokens = base.tokens.extend(new) if base is not None else IntVector.of(new)
    if not len(tokens):
        raise InvalidRequestError("the prompt is empty: it must hold at least one token")
    return Resolved(tokens=tokens, base=base)


def parts_of(context: Context) -> list[Any]:
    """The parts of a context, in order: a list of parts spliced out, anything else alone."""
    return list(context) if isinstance(context, list | tuple) and not is_ids(context) else [context]


def encode(model: Model, text: str, *, first: bool) -> np.ndarray:
    """The tokens of a text, int32; the start token, where the model has one, only if `first`."""
    if model.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer: give token ids, not text")
    return token_array(model.tokenizer.encode(text, add_special_tokens=first), model.config.vocab_size)


def token_array(ids: Any, vocab_size: int, where: str = "") -> np.ndarray:
    """Token ids as int32; raises `InvalidRequestError` naming the first that is not an integer or outside the vocabulary.

    Messages begin with `where`.
    """
    lead = f"{where}: " if where else ""
    if not isinstance(ids, list | tuple | np.ndarray):
        accepted = "a chunk, a text or token ids" if where else "a chunk, a text, token ids or a list of these"
        raise InvalidRequestError(f"{where or 'a prompt'} must be {accepted}, not {type(ids).__name__}")
    given, ids = ids, _packed(ids)
    if isinstance(ids, list | tuple):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                wrong = f"{lead}token id {reprlib.repr(token)} is of type {type(token).__name__}, not an integer"
                raise InvalidRequestError(wrong + ("; a part is a chunk, a text or a list of token ids alone" if where else ""))
    try:
        found = np.asarray(ids, dtype=None if len(ids) else np.int32)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{lead}token ids must be a flat list of integers: {error}") from None
    if found.ndim == 1 and found.dtype.kind not in "iu" and isinstance(ids, list | tuple):  # integers beyond 64 bits, or mixed with such
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"{lead}token id {reprlib.repr(wrong)} is outside the vocabulary 0 ... {vocab_size - 1}")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidRequestError(f"{lead}token ids must be a flat list of integers, not an array of {found.dtype} with {found.ndim} axes")
    if len(found) and ((found.dtype.kind == "i" and found.min() < 0) or found.max() >= vocab_size):
        wrong = found[(found < 0) | (found >= vocab_size)][0]
        raise InvalidRequestError(f"{lead}token id {int(wrong)} is outside the vocabulary 0 ... {vocab_size - 1}")
    return found.astype(np.int32) if ids is given else found.view(np.int32)  # packed: 32 bits, of our own


def _packed(ids: Any) -> Any:
    """A list of integers of 32 bits as an array, in a third of the time that numpy takes for it; anything else, and a list with a bool
    (which would be 0 or 1, in a tensor too), as it is."""
    if not isinstance(ids, list | tuple):
        return ids
    try:
        found = np.array(array("I", ids))
    except (TypeError, OverflowError):
        return ids
    small = (type(ids[at]) for at in (found < 2).nonzero()[0].tolist())
    return found if all(kind is int or issubclass(kind, np.integer) for kind in small) else ids


def is_ids(context: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list is token ids, not a list of contexts or parts: it begins and ends with none of these."""
    return not any(isinstance(part, str | Chunk | list | tuple | np.ndarray) for part in (*context[:1], *context[-1:]))
