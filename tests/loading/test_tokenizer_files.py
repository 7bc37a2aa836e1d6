"""A folder's tokenizer files: the ids, texts and prompts are those that transformers has of the same folder."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.tokenizer_files import load_tokenizer
from nanovllm.testing.models import BYTE_VOCAB, save_tokenizer
from nanovllm.tokenizer.detokenizer import Detokenizer

CORPUS = ["The king of the land is here, and the king's ships are there.", "hello world, the sea is wide", "Élan été\n\tfor 1234"] * 3
TEXTS = [
    "the king of the sea",
    " two  spaces, and a tail ",
    "Élan 漢字 🙂 \x00\u200d",
    "",
    "\n\n\tx",
    "before<s>the middle</s> after <|tool|>x <pad> <extra> é",
    "a<|im_start|>user\nhi<|im_end|>",
    "<think>the</think>king",
]
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "the king?"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
SPECIAL = ("<unk>", "<s>", "</s>")


def put(folder: Path, name: str, value: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2 and Qwen have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return backend


def pieces(corpus: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary and merges over `▁`, byte tokens in front, as SentencePiece's BPE has them."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [word for word, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    return {word: i for i, word in enumerate(words)}, [tuple(merge) for merge in model["merges"]]


def metaspace(start: bool = True) -> tokenizers.Tokenizer:
    """As transformers makes Llama's and Mistral's: `▁` before the first word, bytes for unknown characters, a start token."""
    vocab, merges = pieces([f" {text}" for text in CORPUS])
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    strip = decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    if start:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def prepended() -> tokenizers.Tokenizer:
    """As older Llama folders have it: `▁` by a normaliser, before every part between special tokens."""
    backend = metaspace()
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def gemma() -> tokenizers.Tokenizer:
    """No space in front, whole lines as one word."""
    vocab, merges = pieces(CORPUS)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=60, special_tokens=[*SPECIAL], unk_token="<unk>", show_progress=False)
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return backend


NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHATML = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {str(token_id): {"content": content, **usual, **flags}}


# the tokenizer, its model_type, and its tokenizer_config.json; tokens may be added from the next free id on
FOLDERS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], str, Callable[[int], dict[str, Any]]]] = {
    "byte-level": (byte_level, "qwen3", lambda free: {"tokenizer_class": "PreTrainedTokenizerFast", **CHATML}),
    "llama": (metaspace, "llama", lambda free: {"tokenizer_class": "LlamaTokenizer", **NAMES}),
    "llama, no start token": (
        lambda: metaspace(start=False),
        "llama",
        lambda free: {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, **NAMES},  # not heard beside a tokenizer.json
    ),
    "llama, older": (prepended, "llama", lambda free: {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}),
    "gemma": (gemma, "gemma", lambda free: {"tokenizer_class": "GemmaTokenizer", **NAMES, "pad_token": "</s>", "mask_token": "<unk>"}),
    "unigram": (unigram, "llama", lambda free: {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}),
    "declared tokens": (
        byte_level,
        "qwen3",
        lambda free: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **CHATML,
            "added_tokens_decoder": added(free, "<|tool|>") | added(free + 1, "<extra>", special=False, lstrip=True, rstrip=True),
        },
    ),
    "declared flags": (
        byte_level,
        "qwen3",
        lambda free: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **CHATML,
            "added_tokens_decoder": added(free - 2, "<think>") | added(free - 1, "</think>", rstrip=True, special=False),
        },
    ),
    "named tokens": (
        byte_level,
        "qwen3",
        lambda free: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **CHATML,
            "bos_token": {"__type": "AddedToken", "content": "<s>", "rstrip": True, "normalized": False},
            "unk_token": "the",  # of the vocabulary, but no added token
            "pad_token": "<pad>",
            "additional_special_tokens": ["<|tool|>", "<|im_start|>", "</s>"],
        },
    ),
    "named tokens by name": (
        byte_level,
        "qwen3",
        lambda free: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **CHATML,
            "tool_token": "<|tool|>",
            "extra_special_tokens": {"x": "<extra>"},
        },
    ),
}


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def write(folder: Path, kind: str) -> int:
    """The files of one of `FOLDERS`, and the first id behind those of its `tokenizer.json`."""
    make, model_type, config = FOLDERS[kind]
    backend = make()
    backend.save(str(folder / "tokenizer.json"))
    free = backend.get_vocab_size()
    put(folder, "config.json", {"model_type": model_type})
    put(folder, "tokenizer_config.json", config(free))
    return free


def assert_same(folder: Path) -> None:
    expected, ours = theirs(folder), load_tokenizer(folder)
    assert ours.max_token_id == len(expected) - 1
    for text in TEXTS:
        for around in (True, False):
            ids = expected.encode(text, add_special_tokens=around)
            assert ours.encode(text, add_special_tokens=around) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip) == expected.decode(ids, skip_special_tokens=skip), text
    for token_id in range(len(expected)):
        assert ours.decode([token_id]) == expected.decode([token_id], skip_special_tokens=True)


@pytest.mark.parametrize("kind", FOLDERS)
def test_ids_and_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    assert_same(tmp_path)


def test_older_files_add_tokens_as_in_transformers(tmp_path: Path) -> None:
    free = write(tmp_path, "byte-level")
    put(tmp_path, "added_tokens.json", {"<extra>": free + 1, "<|tool|>": free, "<think>": free - 2})
    put(tmp_path, "special_tokens_map.json", {"bos_token": {"content": "<s>", "lstrip": True}})
    put(tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<|tool|>"]})
    assert_same(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert (ours.special_tokens["bos_token"], ours.bos_token_id) == ("<s>", free + 2)
    assert ours.decode([free, free + 1]) == "<extra>"  # the other one is special


def test_special_tokens_get_no_ids_that_the_model_lacks(tmp_path: Path) -> None:
    free = write(tmp_path, "named tokens")
    for room in range(5):
        ours = load_tokenizer(tmp_path, free + room)
        assert ours.max_token_id == free - 1 + min(room, 4)
        assert ours.special_tokens["bos_token"] == "<s>"  # templates write it all the same


BAD_TOKENS = {
    "another id": ({"added_tokens_decoder": added(400, "<|tool|>")}, "'<|tool|>' is declared as 400, but the tokenizer gives it 3"),
    "no ids": ({"added_tokens_decoder": {"x": {"content": "a"}}}, "tokenizer_config.json: an added token needs an id and a text"),
    "no tokens": ({"added_tokens_decoder": {"7": {"text": "a"}}}, "tokenizer_config.json: an added token needs an id and a text"),
    "text": ({"added_tokens_decoder": {"7": "a"}}, "tokenizer_config.json: an added token needs an id and a text"),
    "an empty one": ({"added_tokens_decoder": {"7": {"content": ""}}}, "tokenizer_config.json: an added token needs an id and a text"),
    "a list": ({"added_tokens_decoder": ["a"]}, "tokenizer_config.json: an added token needs an id and a text"),
}


@pytest.mark.parametrize("fault", BAD_TOKENS)
def test_added_tokens_that_cannot_be_are_refused(fault: str, tmp_path: Path) -> None:
    write(tmp_path, "byte-level")
    config, told = BAD_TOKENS[fault]
    put(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(CheckpointError) as raised:
        load_tokenizer(tmp_path)
    assert told in str(raised.value)
    put(tmp_path, "tokenizer_config.json", {})
    put(tmp_path, "added_tokens.json", {"a": "b"})
    with pytest.raises(CheckpointError, match=r"added_tokens.json: an added token needs an id and a text"):
        load_tokenizer(tmp_path)


def test_ids_that_only_pad_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    """Models draw them like any other, as in transformers."""
    for kind in ("byte-level", "llama", "unigram"):
        free = write(tmp_path, kind)
        ours, expected = load_tokenizer(tmp_path, free + 64), theirs(tmp_path)
        king = ours.encode("the 🙂 king", add_special_tokens=False)
        for ids in ([free], [free + 63, *king], [*king[:3], free + 9, *king[3:]], [*king, free]):
            assert ours.decode(ids) == expected.decode(ids, skip_special_tokens=True)
            stream, text = Detokenizer.of(ours), ""
            for token_id in ids:
                stream, piece = stream.push([token_id])
                text += piece
            assert text + stream.rest() == ours.decode(ids)


# Templates

DEFAULT, TOOLS, OTHER = f"D {TEMPLATE}", f"T {{{{ tools | length }}}} {TEMPLATE}", f"O {TEMPLATE}"
NAMED = [{"name": "default", "template": OTHER}, {"name": "tool_use", "template": TOOLS}, {"name": "rag", "template": "R"}]
TEMPLATES: dict[str, dict[str, Any]] = {
    "config": {"tokenizer_config.json": {"chat_template": DEFAULT}},
    "config, by name": {"tokenizer_config.json": {"chat_template": NAMED}},
    "file": {"chat_template.jinja": DEFAULT},
    "file before config": {"chat_template.jinja": DEFAULT, "tokenizer_config.json": {"chat_template": OTHER}},
    "file before named ones": {"chat_template.jinja": DEFAULT, "tokenizer_config.json": {"chat_template": NAMED}},
    "more files": {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOLS},
    "more files before config": {"additional_chat_templates/tool_use.jinja": TOOLS, "tokenizer_config.json": {"chat_template": DEFAULT}},
    "no default": {"tokenizer_config.json": {"chat_template": NAMED[1:]}},
    "none": {},
}


@pytest.mark.parametrize("where", TEMPLATES)
def test_templates_are_found_as_in_transformers(where: str, tmp_path: Path) -> None:
    write(tmp_path, "llama")
    base = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name, value in TEMPLATES[where].items():
        put(tmp_path, name, {**base, **value} if isinstance(value, dict) else value)
    ours, expected = load_tokenizer(tmp_path), theirs(tmp_path)
    for tools in (None, [{"name": "f"}], []):
        try:
            wanted = expected.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(InvalidRequestError, match=r"no chat template|none of the model's chat templates"):
                ours.apply_chat_template(MESSAGES, tools=tools)
        else:
            assert ours.apply_chat_template(MESSAGES, add_generation_prompt=False, tools=tools) == wanted


def test_the_template_of_a_processor_is_the_last_resort(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    put(tmp_path, "chat_template.json", {"chat_template": DEFAULT})
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES).startswith("D <s>")
    put(tmp_path, "chat_template.jinja", OTHER)
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES).startswith("O <s>")


# Folders without a tokenizer.json


def test_vocabulary_and_merges_are_converted(tmp_path: Path) -> None:
    byte_level().model.save(str(tmp_path))
    put(tmp_path, "config.json", {"model_type": "gpt2"})
    put(tmp_path, "added_tokens.json", {"<|im_start|>": 300, "<|endoftext|>": 301})
    for config in ({}, {"add_bos_token": True}, {"chat_template": TEMPLATE, "eos_token": "<|im_start|>"}):
        put(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **config})
        assert_same(tmp_path)
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES[1:]) == "<|endoftext|>[user] the king?<|im_start|>"


def sentencepiece_model(folder: Path, kind: str) -> None:
    import sentencepiece

    (folder / "corpus.txt").write_text("\n".join(CORPUS * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "tokenizer"), model_type=kind, vocab_size=320, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip


@pytest.mark.skipif(not (find_spec("sentencepiece") and find_spec("google")), reason="needs sentencepiece and protobuf")
@pytest.mark.parametrize(
    "kind,model_type,config",
    [
        ("bpe", "llama", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
        ("bpe", "mistral", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_prefix_space": False}),
        ("bpe", "gemma", {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}),
        ("bpe", "ernie4_5", {"tokenizer_class": "Ernie4_5_Tokenizer", "auto_map": {"AutoTokenizer": ["remote.Theirs", None]}}),
        ("unigram", "t5", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sentencepiece_is_converted(kind: str, model_type: str, config: dict[str, Any], tmp_path: Path) -> None:
    sentencepiece_model(tmp_path, kind)
    put(tmp_path, "config.json", {"model_type": model_type})
    put(tmp_path, "tokenizer_config.json", config)
    assert_same(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.bos_token_id == ours.backend.token_to_id("<s>") == 1
    assert (ours.encode("the king")[0] == 1) == config.get("add_bos_token", False)


@pytest.mark.skipif(bool(find_spec("sentencepiece") and find_spec("google")), reason="what is told without sentencepiece or protobuf")
def test_without_sentencepiece_its_package_is_named(tmp_path: Path) -> None:
    put(tmp_path, "config.json", {"model_type": "llama"})
    put(tmp_path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(CheckpointError, match=r"tokenizer.model needs pip install .*(sentencepiece|protobuf)"):
        load_tokenizer(tmp_path)


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).max_token_id == BYTE_VOCAB - 1
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer; expected tokenizer.json \(or one of tokenizer.model"):
        load_tokenizer(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path)
