"""Reads a checkpoint's tokenizer: `tokenizer.json` or files that can be converted, tokens that other files add, and chat templates."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from nanovllm.errors import CheckpointError
from nanovllm.loading.hub import read_json
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer

CONVERTED = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "merges.txt")  # transformers can convert these

USUAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")  # in the order of transformers
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(folder: Path, vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder.

    `tokenizer.json` is used unchanged, with the start token that its post-processor adds. It gets the tokens that `tokenizer_config.json`
    adds, or in older folders `added_tokens.json` and `special_tokens_map.json`. Without a `tokenizer.json`, transformers converts the
    folder's files; importing it takes seconds. A start token is then added if `add_bos_token` says so.

    Args:
        folder: The checkpoint folder.
        vocab_size: The model's vocabulary. Special tokens that are only named get no id beyond it.

    Raises:
        CheckpointError: The tokenizer is missing or malformed.
    """
    config, special = read_json(folder / "tokenizer_config.json"), read_json(folder / "special_tokens_map.json")
    config = {**special, **config} if "added_tokens_decoder" in config else {**config, **special}
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
        add_tokens(backend, folder, config, vocab_size)
    else:
        backend, names = convert(folder)
        config = {**names, **{key: value for key, value in config.items() if value is not None}}
    return make_tokenizer(backend, config, read_templates(folder, config))


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], vocab_size: int | None) -> None:
    """Add the tokens that other files declare or name, in the order of transformers: declared tokens by id, then named special tokens.

    Raises `CheckpointError` if a token would get another id than the declared one.
    """
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    special = dict(special_tokens(config))
    new: dict[str, tuple[int | None, AddedToken]] = {}
    for token_id, token in sorted(_declared(folder, config, set(special)).items()):
        kept = present.get(token.content)
        if kept is None or ("added_tokens_decoder" in config and repr(kept) != repr(token)):
            token.special = token.special or token.content in special
            new[token.content] = (token_id if backend.token_to_id(token.content) is None else None, token)
    named = {text: token for text, token in special.items() if text not in present and text not in new}
    backend.add_tokens([token for _, token in new.values()])
    for text, (token_id, _) in new.items():
        if token_id is not None and backend.token_to_id(text) != token_id:
            raise CheckpointError(
                f"{folder}: the added token {text!r} is declared as {token_id}, but the tokenizer gives it {backend.token_to_id(text)}"
            )
    unknown = [text for text in named if backend.token_to_id(text) is None]
    if unknown and vocab_size is not None:
        room = vocab_size - 1 - max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        named = {text: token for text, token in named.items() if text not in unknown[max(0, room) :]}
    backend.add_tokens(list(named.values()))


def special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken]]:
    """The special tokens that a `tokenizer_config.json` names, by their text: the usual ones, others with a name, and unnamed ones."""
    more = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    extra = more.values() if isinstance(more, Mapping) else more if isinstance(more, list) else ()
    others = (value for key, value in config.items() if key.endswith("_token") and key not in USUAL)
    for value in (*(config.get(key) for key in USUAL), *others, *extra):
        token = _token({"content": value} if isinstance(value, str) else value, special=True)
        if token is not None:
            yield token.content, token


def _token(fields: Any, **more: bool) -> AddedToken | None:
    if not isinstance(fields, Mapping) or not isinstance(fields.get("content"), str) or not fields["content"]:
        return None
    flags = {name: value for name, value in fields.items() if name in FLAGS and isinstance(value, bool)}
    return AddedToken(fields["content"], **{**flags, **more})


def _declared(folder: Path, config: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    if "added_tokens_decoder" in config:
        file, given = folder / "tokenizer_config.json", config["added_tokens_decoder"]
        pairs = [(token_id, _token(fields)) for token_id, fields in given.items()] if isinstance(given, Mapping) else [(given, None)]
    else:
        file = folder / "added_tokens.json"
        given = read_json(file)
        named = {text: text in special for text in given}
        pairs = [(given[text], _token({"content": text}, normalized=not known, special=known)) for text, known in named.items()]
    declared: dict[int, AddedToken] = {}
    for token_id, token in pairs:
        if token is None or isinstance(token_id, bool) or not str(token_id).isdecimal():
            raise CheckpointError(f"{file}: an added token needs an id and a text, not {token_id!r}: {token!r}")
        declared[int(token_id)] = token
    return declared


def convert(folder: Path) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """Return the tokenizer that transformers converts from a folder without `tokenizer.json`, and its special tokens by name.

    Raises `CheckpointError` if there are no files to convert, or if the conversion fails.
    """
    files = [name for name in CONVERTED if (folder / name).is_file()]
    if not files:
        raise CheckpointError(f"{folder}: no tokenizer; expected tokenizer.json (or one of {', '.join(CONVERTED)}, to be converted)")
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return made.backend_tokenizer, made.special_tokens_map
    except Exception as error:  # a conversion may raise anything
        missing = [package for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google")) if not find_spec(module)]
        hint = f"; {files[0]} needs pip install {' '.join(missing)}" if missing and files[0].endswith(".model") else ""
        raise CheckpointError(f"{folder}: no tokenizer.json, and transformers could not convert the tokenizer{hint}: {error}") from error


def read_templates(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Read a folder's chat templates by name, `default` and others, as transformers finds them; `{}` if there are none.

    `chat_template.jinja` and `additional_chat_templates/*.jinja` replace the templates of `tokenizer_config.json`, which has one template
    or a list of named ones. If both are missing, the `chat_template.json` of a processor is used.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.name.removesuffix(".jinja"): file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if texts := {name: file.read_text(encoding="utf-8", errors="replace") for name, file in files.items() if file.is_file()}:
        return texts
    source = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
    if isinstance(source, str):
        return {"default": source}
    return {k: v for k, v in source.items() if isinstance(k, str) and isinstance(v, str)} if isinstance(source, Mapping) else {}
