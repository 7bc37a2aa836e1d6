"""Text and token ids: a checkpoint's `tokenizer.json` over the `tokenizers` library, and a detokenizer for streams."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from .chat_template import Render, compile_template
from .errors import CheckpointError, InvalidRequestError

REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character, or not yet one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """One checkpoint's tokenizer and chat template. `special_tokens` maps names such as `bos_token` to their text."""

    backend: tokenizers.Tokenizer = field(repr=False)
    render: Render = field(repr=False)
    special_tokens: Mapping[str, str]
    bos_token_id: int | None
    max_token_id: int
    think_token_ids: tuple[int, int] | None  # of `<think>` and `</think>`, where both are single tokens
    byte_token_ids: frozenset[int] = field(repr=False)  # of the byte-fallback tokens `<0x00>` ... `<0xFF>`, where there are any

    def encode(self, text: str | bytes, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; bytes are read as UTF-8. Text like `<|im_end|>` becomes the special token it names.

        `add_special_tokens` puts the start token (and what else the tokenizer wants) around the text: true only where nothing stands
        before it. Raises `InvalidRequestError` naming the position for a lone surrogate or a byte that is not UTF-8.
        """
        return self.backend.encode(check_text(text), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; an id that the tokenizer does not know gives no text."""
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


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises `CheckpointError` if it is missing or malformed.

    Without a `tokenizer.json`, transformers converts what the folder has (importing it takes seconds).
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    else:
        backend = _converted(folder)
    config = _read_json(folder / "tokenizer_config.json")
    source = _template_source(folder, config)
    return make_tokenizer(backend, {**_read_json(folder / "special_tokens_map.json"), **config}, source)


def make_tokenizer(backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None) -> Tokenizer:
    """A `Tokenizer` from its parts; `config` has the form of a `tokenizer_config.json`. Takes over `backend`: truncation and padding go."""
    backend.no_truncation()
    backend.no_padding()
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    special = {key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, str)}
    start, stop = backend.token_to_id("<think>"), backend.token_to_id("</think>")
    by_byte = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return Tokenizer(
        backend=backend,
        render=compile_template(template),
        special_tokens=MappingProxyType(special),
        bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        max_token_id=max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        think_token_ids=None if start is None or stop is None else (start, stop),
        byte_token_ids=frozenset(i for i in by_byte if i is not None),
    )


def _converted(folder: Path) -> tokenizers.Tokenizer:
    known = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "merges.txt")
    if not any((folder / name).is_file() for name in known):
        raise CheckpointError(f"{folder}: no tokenizer; expected tokenizer.json (or one of {', '.join(known)}, to be converted)")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False).backend_tokenizer
    except Exception as error:  # whatever a conversion trips over
        raise CheckpointError(f"{folder}: no tokenizer.json, and transformers could not convert the tokenizer: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: a {type(value).__name__}, expected an object")
    return value


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    source = config.get("chat_template")
    if isinstance(source, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None
