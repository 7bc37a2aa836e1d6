"""Text in and out: streams that add up, text that is refused, templates that stay in their sandbox."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.tokenizer_files import load_tokenizer
from nanovllm.testing.models import CHAT_TEMPLATE, SPECIAL, byte_tokenizer, save_tokenizer
from nanovllm.tokenizer.detokenizer import Detokenizer
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer

BYTES = byte_tokenizer()


def metaspace_tokenizer() -> Tokenizer:
    """SentencePiece as Llama 2 has it: spaces as ▁, the first one dropped, unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁a", "▁b", "a", "b", "ab", "é", "▁▁", "."]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in ("<unk>", "<s>", "</s>")])
    return make_tokenizer(backend, {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}, None)


METASPACE = metaspace_tokenizer()


@given(st.text())
def test_text_survives_the_byte_tokenizer(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.mark.parametrize("tokenizer", [BYTES, METASPACE], ids=["byte-level", "metaspace"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_pieces_add_up_and_never_split_a_character(tokenizer: Tokenizer, skip: bool, data: st.DataObject) -> None:
    # Text, special tokens and raw ids (so, invalid bytes) in any order.
    spans = st.one_of(st.text(max_size=6), st.lists(st.integers(0, tokenizer.max_token_id), max_size=5))
    ids = []
    for span in data.draw(st.lists(spans, max_size=6)):
        ids += tokenizer.encode(span, add_special_tokens=False) if isinstance(span, str) else span
    stream, text, left = Detokenizer.of(tokenizer, skip), "", ids
    while left:
        step = data.draw(st.integers(1, 3))
        before = stream
        stream, piece = stream.push(left[:step])
        assert before.push(left[:step])[1] == piece
        assert not piece.endswith("\ufffd")
        text, left = text + piece, left[step:]
    assert text + stream.rest() == tokenizer.decode(ids, skip)


def test_a_character_comes_out_whole() -> None:
    stream, pieces = Detokenizer.of(BYTES), []
    for token in BYTES.encode("é🙂x"):
        stream, piece = stream.push([token])
        pieces.append(piece)
    assert pieces == ["", "é", "", "", "", "🙂", "x"]
    assert stream.rest() == ""


@pytest.mark.parametrize(
    "text,named",
    [
        ("ab\ud800c", "U\\+D800 at position 2"),
        ("\udfff", "U\\+DFFF at position 0"),
        (b"ab\xff", "0xff at position 2"),
        (b"\xe4\xbd", "position 0"),
    ],
)
def test_text_that_is_no_unicode_is_refused_with_its_position(text: str | bytes, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        BYTES.encode(text)
    assert BYTES.encode("ab", add_special_tokens=False) == BYTES.encode(b"ab", add_special_tokens=False)


def test_special_tokens(tmp_path: Path) -> None:
    first = 256
    assert [BYTES.encode(token) for token in SPECIAL] == [[first + i] for i in range(len(SPECIAL))]
    assert BYTES.think_token_ids == (259, 260)
    assert METASPACE.think_token_ids is None
    assert BYTES.max_token_id == 260
    assert (BYTES.bos_token_id, METASPACE.bos_token_id) == (None, 1)
    assert BYTES.decode([*BYTES.encode("a"), 258, 259]) == "a<think>"
    assert BYTES.decode([258], skip_special_tokens=False) == "<|im_end|>"
    assert BYTES.decode([9999]) == ""


def test_start_token_only_where_asked() -> None:
    backend = tokenizers.Tokenizer.from_str(METASPACE.backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = make_tokenizer(backend, {"bos_token": "<s>"}, None)
    plain = tokenizer.encode("a b ab", add_special_tokens=False)
    assert len(plain) > 2
    assert tokenizer.encode("a b ab") == [1, *plain]


def test_load_reads_what_save_wrote(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "né <|im_start|>"
    assert loaded.encode(text) == BYTES.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(messages) == BYTES.apply_chat_template(messages)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D {{ eos_token }}"}],
                "eos_token": "E",
            }
        )
    )
    assert load_tokenizer(tmp_path).apply_chat_template(messages) == "D E"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        load_tokenizer(tmp_path)


def test_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    letters = {piece: i for i, piece in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    (tmp_path / "vocab.json").write_text(json.dumps({**letters, "<|endoftext|>": 256}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("a bé")) == "a bé"


def test_chat_template_equals_that_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = CHAT_TEMPLATE + (
        "{%- generation %}[{{ messages | tojson }}]{% endgeneration %}\n  {% if tools %}\n  {{ tools | tojson(indent=2) }}\n  {% endif %}\n"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ documents is none }}{{ bos_token }}"
    )
    tokenizer = make_tokenizer(byte_tokenizer().backend, {"bos_token": "<s>"}, template)
    messages = [{"role": "system", "content": "<b>&é"}, {"role": "user", "content": "hi"}]
    tools = [{"name": "f", "parameters": {"x": 1}}]
    for think in (True, False):
        for more in ({}, {"tools": tools}):
            expected, _ = render_jinja_template(
                conversations=[messages], chat_template=template, add_generation_prompt=True, enable_thinking=think, bos_token="<s>", **more
            )
            assert tokenizer.apply_chat_template(messages, enable_thinking=think, **more) == expected[0]


def test_variables_of_the_caller_win_over_special_tokens() -> None:
    tokenizer = make_tokenizer(byte_tokenizer().backend, {"bos_token": "<s>", "eos_token": "</s>"}, "{{ bos_token }} {{ eos_token }}")
    assert tokenizer.apply_chat_template([]) == "<s> </s>"
    assert tokenizer.apply_chat_template([], bos_token="own") == "own </s>"


@pytest.mark.parametrize(
    "options",
    [
        "",
        "sort_keys=true",
        "sort_keys=false",
        "ensure_ascii=true",
        "indent=3",
        "separators=(',', ':')",
        "true, 1, (';', '='), true",
    ],
)
def test_tojson_takes_the_options_of_transformers(options: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = f"{{{{ messages | tojson({options}) }}}}"
    messages = [{"role": "user", "content": "é<b>", "also": {"z": 1, "a": [2, 3]}}]
    expected, _ = render_jinja_template(conversations=[messages], chat_template=template)
    assert make_tokenizer(byte_tokenizer().backend, {}, template).apply_chat_template(messages) == expected[0]


BAD_TEMPLATES = {
    "missing": (None, "no chat template"),
    "syntax": ("{% for %}", "does not compile"),
    "its own refusal": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "error": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "class walk": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "globals": ("{{ raise_exception.__globals__['datetime'] }}", "SecurityError"),
    "builtins": ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    "format": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "SecurityError"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError"),
    "include": ("{% include '/etc/passwd' %}", "Include is not supported"),
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError"),
    "power": ("{{ 9 ** (9 ** 9) }}", "SecurityError"),
    "repetition": ("{{ 'x' * 10**10 }}", "SecurityError"),
    "list repetition": ("{{ (10**10 * [1]) | length }}", "SecurityError"),
    "endless output": (
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "exceed",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
}


@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_a_bad_template_is_a_request_error_and_the_next_request_is_served(case: str) -> None:
    source, named = BAD_TEMPLATES[case]
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = make_tokenizer(byte_tokenizer().backend, {}, source)
    with pytest.raises(InvalidRequestError, match=named):
        tokenizer.apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"


def test_messages_must_have_roles() -> None:
    for bad in ([{"content": "x"}], [{"role": 1, "content": "x"}]):
        with pytest.raises(InvalidRequestError, match="role"):
            BYTES.apply_chat_template(bad)
