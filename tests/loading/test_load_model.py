"""A folder's `generation_config.json`: its end tokens hold for all, its options for those who ask for them."""

import json
from pathlib import Path
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.server import front_model
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.load_model import load_model
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config


def folder_with(path: Path, eos: tuple[int, ...] = (258,), **options: Any) -> Path:
    folder = save_hf_folder(path, tiny_config(eos_token_ids=eos))
    (folder / "generation_config.json").write_text(json.dumps(options))
    return folder


@pytest.mark.parametrize(
    "of_config,of_generation,ends",
    [((258,), 256, (258, 256)), ((257, 258), [256, 258], (257, 258, 256)), ((), [3], (3,)), ((258,), None, (258,)), ((), [], ())],
)
def test_end_tokens_are_the_union_of_both_files(
    of_config: tuple[int, ...], of_generation: Any, ends: tuple[int, ...], tmp_path: Path
) -> None:
    model = load_model(folder_with(tmp_path, of_config, eos_token_id=of_generation, top_k=20), device="cpu")
    assert model.config.eos_token_ids == ends
    assert model.generation_config["top_k"] == 20


def test_a_reply_ends_at_any_of_them(tmp_path: Path) -> None:
    model = load_model(folder_with(tmp_path, eos_token_id=[3, 258]), device="cpu")
    for end in (3, 258):
        (out,) = nv.LLM(model, num_pages=8).generate("x", nv.SamplingParams(temperature=0, max_tokens=9, logit_bias={end: 100}))
        assert (out.finish_reason, out.token_ids) == ("stop", [end])


@pytest.mark.parametrize("bad", ["x", -1, [258, True], [1.5], {"a": 1}], ids=repr)
def test_end_tokens_that_are_no_ids_are_refused_with_their_file(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id=.* must be a token id or a list") as raised:
        load_model(folder_with(tmp_path, eos_token_id=bad), device="cpu")
    assert repr(bad) in str(raised.value)


@pytest.mark.parametrize("change", [{"hidden_act": "cosine"}, {"num_hidden_layers": "x"}, {"quantization_config": 4}], ids=repr)
def test_a_config_that_is_refused_is_named_with_its_folder(change: dict[str, Any], tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as raised:
        load_model(folder, device="cpu")
    assert str(raised.value).startswith(f"{folder}/config.json: {next(iter(change))}=")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_what_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config())
    (folder / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"generation_config.json: (not JSON|a list, expected)"):
        load_model(folder, device="cpu")


def test_bad_options_are_told_to_those_who_ask_for_them(tmp_path: Path) -> None:
    options = {"do_sample": True, "temperature": "hot", "of_no_engine": {"deep": [1]}, "transformers_version": "9"}
    llm = nv.LLM(folder_with(tmp_path, **options), device="cpu", num_pages=8)
    with pytest.raises(InvalidRequestError, match="temperature='hot'"):
        llm.generate("x")
    assert llm.generate("x", nv.SamplingParams(temperature=0, max_tokens=2))[0].finish_reason == "length"
    del options["temperature"]
    assert nv.LLM(folder_with(tmp_path, **options), device="cpu", num_pages=8).generate("x")


def test_ids_that_only_pad_the_vocabulary_are_drawn_and_have_no_text() -> None:
    llm = nv.LLM(random_model(tiny_config()), num_pages=8)
    assert llm.tokenizer is not None
    last = llm.model.config.vocab_size - 1
    assert last > llm.tokenizer.max_token_id
    params = nv.SamplingParams(temperature=0, max_tokens=4, logit_bias={last: 100}, ignore_eos=True)
    (out,) = llm.generate("x", params)
    assert (out.token_ids, out.text) == ([last] * 4, "")
    assert "".join(piece.text for piece in llm.stream("x", params)) == ""


def test_a_front_end_knows_the_end_tokens_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order, by which prepared grammars are found."""
    prepared = list[tuple[int, ...]]()
    monkeypatch.setattr(front_model, "prepare_grammars", lambda tokenizer, vocab_size, end_ids: prepared.append(end_ids))
    folder = folder_with(tmp_path, (257, 258), eos_token_id=[7, 258, 7, 9])
    front_model.load_front(Settings(), str(folder), {})
    assert prepared == [load_model(folder, device="cpu").config.eos_token_ids] == [(257, 258, 7, 9)]
