"""Contexts: a chunk, a text, token ids, or a list of these, resolved to tokens after at most one base chunk."""

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
from nanovllm.tokenizer.tokenizer import TooManyTokensError

Context: TypeAlias = "Chunk | str | list[Any] | tuple[Any, ...] | np.ndarray"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolved:
    """The tokens of a context, and the chunk whose KV its first tokens have (None: no token is filled).

    `cut` says that `tokens` has more tokens than the model has positions and yet not all: a text was too long to be encoded. Their number
    is enough to refuse the context.
    """

    tokens: IntVector
    base: Chunk | None
    cut: bool = False

    @property
    def count(self) -> str:
        """The number of tokens, for messages."""
        return f"more than {len(self.tokens) - 1}" if self.cut else str(len(self.tokens))


def resolve(model: Model, state: EngineState, context: Context) -> Resolved:
    """The tokens of a context. The start token is added only to a text at the very beginning.

    Raises:
        InvalidRequestError: The context is empty, a text is not valid Unicode, an id is outside the vocabulary, or a chunk is not first.
        ReleasedChunkError: The chunk was released.
        ForeignChunkError: The chunk belongs to another engine.
    """
    parts = parts_of(context)
    base: Chunk | None = None
    runs: list[np.ndarray] = []
    most, total, cut = model.config.max_position_embeddings, 0, False
    for place, part in enumerate(parts):
        if isinstance(part, Chunk):
            if place:
                raise InvalidRequestError(
                    f"the context has a chunk at index {place}; only its first part may be one: join chunks with compose"
                )
            base, total = require_live(state, part), len(part)
        elif isinstance(part, str):
            try:
                runs.append(encode(model, part, first=total == 0, most=max(0, most - total)))
            except TooManyTokensError:
                runs.append(np.zeros(max(0, most - total) + 1, np.int32))
                cut = True
                break
        else:
            runs.append(token_array(part, model.config.vocab_size, f"part {place} of the context" if len(parts) > 1 else ""))
        if not isinstance(part, Chunk):
            total += len(runs[-1])
        if total > most and place + 1 < len(parts):
            cut = True
            break
    new = runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.int32), *runs])
    tokens = base.tokens.extend(new) if base is not None else IntVector.of(new)
    if not len(tokens):
        raise InvalidRequestError("the prompt is empty: it must hold at least one token")
    return Resolved(tokens=tokens, base=base, cut=cut)


def parts_of(context: Context) -> list[Any]:
    """The parts of a context in order: the items of a list of parts, or the context itself."""
    return list(context) if isinstance(context, list | tuple) and not is_ids(context) else [context]


def encode(model: Model, text: str, *, first: bool, most: int | None = None) -> np.ndarray:
    """The tokens of a text, int32. The start token, if the model has one, is added only if `first`.

    Raises:
        TooManyTokensError: The text has more than `most` tokens. A text with only a few more may be encoded.
        InvalidRequestError: The model has no tokenizer.
    """
    if model.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer: pass token ids, not text")
    return token_array(model.tokenizer.encode(text, add_special_tokens=first, most=most), model.config.vocab_size)


def token_array(ids: Any, vocab_size: int, where: str = "") -> np.ndarray:
    """Token ids as an int32 array.

    Args:
        ids: A list, a tuple or an array of integers.
        vocab_size: Valid ids are below it.
        where: The start of error messages.

    Raises:
        InvalidRequestError: An id is not an integer or outside the vocabulary; the message names the first such id.
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
                raise InvalidRequestError(wrong + ("; a part must be a chunk, a text or a list of token ids" if where else ""))
    try:
        flat = np.asarray(ids, dtype=None if len(ids) else np.int32)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{lead}token ids must be a flat list of integers: {error}") from None
    if flat.ndim == 1 and flat.dtype.kind not in "iu" and isinstance(ids, list | tuple):  # some integers need more than 64 bits
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"{lead}token id {reprlib.repr(wrong)} is outside the vocabulary 0 ... {vocab_size - 1}")
    if flat.ndim != 1 or flat.dtype.kind not in "iu":
        raise InvalidRequestError(f"{lead}token ids must be a flat list of integers, not an array of {flat.dtype} with {flat.ndim} axes")
    if len(flat) and ((flat.dtype.kind == "i" and flat.min() < 0) or flat.max() >= vocab_size):
        wrong = flat[(flat < 0) | (flat >= vocab_size)][0]
        raise InvalidRequestError(f"{lead}token id {int(wrong)} is outside the vocabulary 0 ... {vocab_size - 1}")
    return flat.astype(np.int32) if ids is given else flat.view(np.int32)  # a packed array is ours and has 32 bits


def _packed(ids: Any) -> Any:
    """A list of 32-bit integers as an array, in a third of the time that numpy needs. Other values are returned unchanged.

    A list that contains a bool, also as a tensor, is returned unchanged, because it would become 0 or 1.
    """
    if not isinstance(ids, list | tuple):
        return ids
    try:
        packed = np.array(array("I", ids))
    except (TypeError, OverflowError):
        return ids
    small = (type(ids[at]) for at in (packed < 2).nonzero()[0].tolist())
    return packed if all(kind is int or issubclass(kind, np.integer) for kind in small) else ids


def is_ids(context: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list is token ids, not a list of contexts or parts; only its first and last items are tested."""
    return not any(isinstance(part, str | Chunk | list | tuple | np.ndarray) for part in (*context[:1], *context[-1:]))
