"""Special tokens that are text all the same, because a program looks for them in replies."""

from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

import nanovllm as nv
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.detokenizer import Detokenizer
from nanovllm.tokenizer.stream import TextStream
from nanovllm.tokenizer.tokenizer import Tokenizer, make_tokenizer

MARKERS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]


def byte_level() -> Tokenizer:
    """As Llama 3 and Qwen3 have it: `<tool_call>` is an added token that is not special, the markers are special."""
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    backend.add_tokens([AddedToken("<tool_call>", special=False)])
    return make_tokenizer(backend, {}, None)


def sentence_piece() -> Tokenizer:
    """As Mistral's older models have it."""
    pieces = ["<unk>", "</s>", *MARKERS, *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "{", "}"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in ("<unk>", "</s>", *MARKERS)])
    return make_tokenizer(backend, {}, None)


def spelled_otherwise() -> Tokenizer:
    """With a decoder that must have all tokens."""
    tokenizer = sentence_piece()
    tokenizer.backend.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
    return make_tokenizer(tokenizer.backend, {}, None)


TOKENIZERS = {"bytes": byte_level(), "runs": sentence_piece(), "other": spelled_otherwise()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_pieces_add_up_to_the_text_with_the_shown_tokens(kind: str, data: st.DataObject) -> None:
    plain = TOKENIZERS[kind]
    assert plain.texts[1].spelling == kind
    shown = plain.showing(MARKERS[:2])
    ids = data.draw(st.lists(st.integers(0, plain.max_token_id), max_size=12))
    kept = {plain.backend.token_to_id(marker) for marker in MARKERS[:2]}
    left_out = {i for i, token in plain.backend.get_added_tokens_decoder().items() if token.special} - kept
    expected = plain.decode([i for i in ids if i not in left_out], skip_special_tokens=False)
    assert shown.decode(ids) == shown.decode(np.array(ids, np.int32)) == expected
    assert shown.decode(ids, skip_special_tokens=False) == plain.decode(ids, skip_special_tokens=False)
    stream, text = Detokenizer.of(shown), ""
    for i in ids:
        stream, piece = stream.push([i])
        text += piece
    assert text + stream.rest() == expected or kind == "other"


def test_only_special_tokens_are_affected() -> None:
    plain = TOKENIZERS["bytes"]
    ids = plain.encode("[TOOL_CALLS]now[ARGS]{}<tool_call><|im_end|>", add_special_tokens=False)
    assert plain.decode(ids) == "now{}<tool_call>"
    assert plain.showing(MARKERS).decode(ids) == "[TOOL_CALLS]now[ARGS]{}<tool_call>"
    assert plain.showing(["<tool_call>", "unknown"]) is plain
    both = plain.showing(MARKERS[:2]).showing(MARKERS[2:])
    assert both.shown == plain.showing(MARKERS).shown == set(map(plain.backend.token_to_id, MARKERS))
    assert plain.decode(ids) == "now{}<tool_call>"  # unchanged


def test_an_engine_shows_them_in_outputs_streams_and_stop_strings() -> None:
    model = replace(random_model(tiny_config(vocab_size=272)), tokenizer=byte_level().showing(MARKERS))
    assert model.tokenizer is not None
    forced = {model.tokenizer.backend.token_to_id("[TOOL_CALLS]"): 100.0}
    llm = nv.LLM(model, num_pages=16)
    options = {"temperature": 0, "max_tokens": 3, "logit_bias": forced}
    (output,) = llm.generate("a", nv.SamplingParams(**options))
    assert output.text == "[TOOL_CALLS]" * 3
    assert "".join(piece.text for piece in llm.stream("a", nv.SamplingParams(**options))) == output.text
    (stopped,) = llm.generate("a", nv.SamplingParams(**options, stop="S][TOOL"))
    assert (stopped.text, stopped.finish_reason) == ("[TOOL_CALL", "stop")
    stream, piece = TextStream.of(model.tokenizer).push(output.token_ids)
    assert piece + stream.end(output.text) == output.text
