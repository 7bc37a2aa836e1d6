"""Text and token ids: a tokenizer over the `tokenizers` library."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers

from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.chat_template import Render, compile_templates
from nanovllm.tokenizer.limit import TokenLimit
from nanovllm.tokenizer.memo import Memo
from nanovllm.tokenizer.token_texts import TokenTexts

MEMO = 128  # compiled grammars of a tokenizer that are kept


class TooManyTokensError(InvalidRequestError):
    """A text has more tokens than a limit. Those who encode texts of users say it with the limit's meaning, as `InvalidRequestError`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """The tokenizer and chat template of one checkpoint.

    Attributes:
        backend: The tokenizer of the `tokenizers` library.
        render: The compiled chat template.
        templates: The sources of the chat templates, by name: `default`, and maybe `tool_use`.
        special_tokens: Names such as `bos_token`, and the text of these tokens.
        bos_token_id: The start token's id, if there is one.
        max_token_id: The highest token id.
        max_base_id: The highest token id of the vocabulary without added tokens.
        think_token_ids: The ids of `<think>` and `</think>`, if both are single tokens.
        texts: What single tokens stand for: with special tokens, and without them, but for those in `shown`.
        limit: Tells from the beginning of a text whether it has more tokens than a limit.
        shown: Special tokens that are text all the same.
        memo: What others made of the tokenizer, such as compiled grammars.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    render: Render = field(repr=False)
    templates: Mapping[str, str] = field(repr=False)
    special_tokens: Mapping[str, str]
    bos_token_id: int | None
    max_token_id: int
    max_base_id: int
    think_token_ids: tuple[int, int] | None
    texts: tuple[TokenTexts, TokenTexts] = field(repr=False)
    limit: TokenLimit = field(repr=False)
    shown: frozenset[int] = frozenset()
    memo: Memo = field(repr=False, default_factory=lambda: Memo(MEMO))

    def encode(self, text: str | bytes, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """The token ids of a text.

        Args:
            text: A string, or bytes, which are read as UTF-8. Text like `<|im_end|>` becomes the special token of this name.
            add_special_tokens: Whether to add the start token, and other tokens that the tokenizer puts around a text. Use it only at the
                beginning of a prompt.
            most: A text with many more tokens is refused after its beginning. None: texts of any length are encoded.

        Raises:
            TooManyTokensError: The text has more than `most` tokens. A text with only a few more may be encoded.
            InvalidRequestError: The text has a lone surrogate, or a byte that is not UTF-8. The message names the position.
            RuntimeError: The library has panicked.
        """
        with _panics_as_errors():
            if most is not None and isinstance(text, str) and self.limit.exceeded(text, most):
                raise TooManyTokensError(f"the text has more than {most} tokens")
            return self.backend.encode(check_text(text), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        An id that the tokenizer does not know gives no text, such as an id that only pads a model's vocabulary.

        Raises:
            RuntimeError: The library has panicked.
        """
        with _panics_as_errors():
            if skip_special_tokens and self.shown:
                left_out = self.texts[1]
                return self.backend.decode([i for i in map(int, ids) if not left_out.leaves_out(i)], skip_special_tokens=False)
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def showing(self, markers: Iterable[str]) -> "Tokenizer":
        """This tokenizer with some special tokens as text, although special tokens are left out: those that a program looks for in replies.

        Streams, stop strings and outputs of a model with the new tokenizer have these texts. Texts that are not special tokens are ignored.
        """
        ids = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special and token.content in set(markers)}
        shown = self.shown | ids
        return replace(self, shown=shown, texts=(self.texts[0], self.texts[1].showing(shown))) if shown != self.shown else self

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, enable_thinking: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation by the model's own template. It contains the special tokens: encode it without adding any.

        Args:
            messages: The messages, each a mapping with a role and its content.
            add_generation_prompt: Whether the text ends where the assistant's reply begins.
            enable_thinking: Passed to the template: whether the reply may begin with a think block.
            **variables: Passed to the template unchanged, such as `tools`.

        Raises:
            InvalidRequestError: There is no template, or it fails.
        """
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidRequestError(f"a message must be a mapping with a role and its content, not {message!r}")
        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        return self.render(
            {**given, "messages": messages, "add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking}
        )


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise a panic of Rust code, which is no `Exception`, as one: it is an error of this text, and no reason to end the engine."""
    try:
        yield
    except BaseException as error:
        if (type(error).__module__, type(error).__name__) != ("pyo3_runtime", "PanicException"):
            raise
        raise RuntimeError(f"the tokenizers library panicked: {error}") from error


def check_text(text: str | bytes) -> str:
    """Return the text, checked to be valid Unicode. Raises `InvalidRequestError` naming the position of the first fault."""
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
        fault = f"lone surrogate U+{code:04X} at position {error.start}"
        if 0xDC80 <= code <= 0xDCFF:  # Python encodes such a byte so in arguments, and in the input of some locales
            fault = f"byte {code - 0xDC00:#04x} at position {error.start} is not valid UTF-8 ({fault})"
        raise InvalidRequestError(fault) from error
    return text


def make_tokenizer(backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | Mapping[str, str] | None) -> Tokenizer:
    """Build a `Tokenizer` from its parts.

    Args:
        backend: The tokenizer of the `tokenizers` library. It is taken over, and its truncation and padding are switched off.
        config: Values in the form of a `tokenizer_config.json`.
        template: A chat template, several by name, or None.
    """
    backend.no_truncation()
    backend.no_padding()
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    special = {key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, str)}
    start, stop = backend.token_to_id("<think>"), backend.token_to_id("</think>")
    vocab = backend.get_vocab(with_added_tokens=True)
    max_token_id = max(vocab.values(), default=-1)
    templates = {"default": template} if isinstance(template, str) else dict(template or {})
    return Tokenizer(
        backend=backend,
        render=compile_templates(templates),
        templates=MappingProxyType(templates),
        special_tokens=MappingProxyType(special),
        bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        max_token_id=max_token_id,
        max_base_id=max(backend.get_vocab(with_added_tokens=False).values(), default=-1),
        think_token_ids=None if start is None or stop is None else (start, stop),
        texts=TokenTexts.of(backend, max_token_id),
        limit=TokenLimit.of(backend, vocab),
    )
