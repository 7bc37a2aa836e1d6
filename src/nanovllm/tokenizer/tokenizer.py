"""Text and token ids: a tokenizer over the `tokenizers` library, and a detokenizer for streams."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers

from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.chat_template import Render, compile_templates

REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character, or not yet one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """One checkpoint's tokenizer and chat template. `special_tokens` maps names such as `bos_token` to their text."""

    backend: tokenizers.Tokenizer = field(repr=False)
    render: Render = field(repr=False)
    special_tokens: Mapping[str, str]
    bos_token_id: int | None
    max_token_id: int
    max_base_id: int  # of the vocabulary without added tokens
    think_token_ids: tuple[int, int] | None  # of `<think>` and `</think>`, where both are single tokens
    byte_token_ids: frozenset[int] = field(repr=False)  # of the byte-fallback tokens `<0x00>` ... `<0xFF>`, where there are any

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; bytes are read as UTF-8. Text like `<|im_end|>` becomes the special token it names.

        `add_special_tokens` puts the start token (and what else the tokenizer wants) around the text: true only where nothing stands
        before it. Raises `InvalidRequestError` naming the position for a lone surrogate or a byte that is not UTF-8.
        """
        return self.backend.encode(check_text(text), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of token ids; an id that the tokenizer does not know gives no text, such as those that only pad a model's vocabulary."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, enable_thinking: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation by the model's own template, special tokens written out: encode it without adding any.

        `variables` (such as `tools`) reach the template as they are. Raises `InvalidRequestError`: no template, or one that fails.
        """
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidRequestError(f"a message must be a mapping with a role and its content, not {message!r}")
        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        return self.render(
            {**given, "messages": messages, "add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking}
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Detokenizer:
    """Token ids in, text out, piece by piece: the pieces and `rest()` together are `decode` of all the ids, and no piece ends inside a
    character.

    `window` holds the ids since the last piece but one, of which the first `num_shown` are already shown: a decoder may drop a space
    at its start, so new ids are decoded behind old ones.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool = True
    window: tuple[int, ...] = ()
    num_shown: int = 0

    @staticmethod
    def of(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> "Detokenizer":
        """A detokenizer that has seen nothing."""
        return Detokenizer(tokenizer=tokenizer, skip_special_tokens=skip_special_tokens)

    def push(self, ids: Iterable[int]) -> "tuple[Detokenizer, str]":
        """The detokenizer after `ids`, and the text that became certain; an unfinished character waits for its other bytes."""
        window = (*self.window, *ids)
        after = replace(self, window=window)
        if not window or self._in_byte_run(window):
            return after, ""
        piece = after.rest()
        if not piece or piece.endswith(REPLACEMENT):
            return after, ""
        return replace(self, window=window[self.num_shown :], num_shown=len(window) - self.num_shown), piece

    def _in_byte_run(self, window: tuple[int, ...]) -> bool:
        """A run of byte tokens, skipped ones between or not, decodes as a whole: one bad byte at its end changes what stands before."""
        runs = self.tokenizer.byte_token_ids
        return bool(runs) and next((i in runs for i in reversed(window) if self.tokenizer.decode([i], self.skip_special_tokens)), False)

    def rest(self) -> str:
        """The text that no piece has shown yet; at the end of a stream, unfinished characters come out as U+FFFD."""
        shown = self.tokenizer.decode(self.window[: self.num_shown], self.skip_special_tokens)
        return self.tokenizer.decode(self.window, self.skip_special_tokens)[len(shown) :]


def check_text(text: str | bytes) -> str:
    """The text, known to be valid Unicode. Raises `InvalidRequestError` naming the position of the first fault."""
    try:
        if isinstance(text, bytes):
            return text.decode("utf-8")
        if not isinstance(text, str):
            raise InvalidRequestError(f"a text must be a str or UTF-8 bytes, not {type(text).__name__}")
        text.encode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"byte {error.object[error.start]:#04x} at position {error.start} is not valid UTF-8") from error
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        told = f"lone surrogate U+{code:04X} at position {error.start}"
        if 0xDC80 <= code <= 0xDCFF:  # what Python makes of such a byte in arguments, and in the input of some locales
            told = f"byte {code - 0xDC00:#04x} at position {error.start} is not valid UTF-8 ({told})"
        raise InvalidRequestError(told) from error
    return text


def make_tokenizer(backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | Mapping[str, str] | None) -> Tokenizer:
    """A `Tokenizer` from its parts; `config` has the form of a `tokenizer_config.json`, `template` is a chat template or several by name.

    Takes over `backend`: truncation and padding go.
    """
    backend.no_truncation()
    backend.no_padding()
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    special = {key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, str)}
    start, stop = backend.token_to_id("<think>"), backend.token_to_id("</think>")
    by_byte = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return Tokenizer(
        backend=backend,
        render=compile_templates({"default": template} if isinstance(template, str) else template or {}),
        special_tokens=MappingProxyType(special),
        bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        max_token_id=max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        max_base_id=max(backend.get_vocab(with_added_tokens=False).values(), default=-1),
        think_token_ids=None if start is None or stop is None else (start, stop),
        byte_token_ids=frozenset(i for i in by_byte if i is not None),
    )
