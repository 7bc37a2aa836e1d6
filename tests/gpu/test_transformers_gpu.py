"""Architectures that run through transformers, on a GPU in bfloat16, beside transformers' own float32 on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import nanovllm as nv
from nanovllm.loading.load_model import load_model
from nanovllm.testing.driver import layout, run_chunks, run_greedy
from nanovllm.testing.models import save_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*runs through transformers")]
SIZES = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WINDOWED = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "stablelm": {},  # heads of 16, a quarter of which turns
    "olmo2": {"hidden_size": 120},  # heads of 20
    "cohere2": WINDOWED,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
}
ROWS = [[(7 * i * i + 3 * row) % 300 for i in range(length)] for row, length in enumerate((97, 1, 33, 8))]


def save(path: Path, kind: str) -> Any:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for weight in theirs.parameters():
        weight.add_(torch.randn_like(weight) * 0.1).copy_(weight.bfloat16())
    theirs.save_pretrained(path)
    save_tokenizer(path)
    return theirs


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_near_those_of_float32_on_a_cpu(kind: str, tmp_path: Path) -> None:
    theirs = save(tmp_path, kind)
    for dtype in ("float32", "bfloat16"):
        model = load_model(tmp_path, device="cuda", dtype=dtype)
        for chunk in (128, 7):
            at = layout(model, [len(row) for row in ROWS], 16)
            for row, got in zip(ROWS, run_chunks(model, ROWS, at, chunk), strict=True):
                want = theirs(input_ids=torch.tensor([row]), use_cache=False).logits[0]
                errors = (got.float().cpu() - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
                # Routers may choose otherwise for a token by rounding, so most tokens must agree.
                assert (errors.max() < 5e-3) if dtype == "float32" else (errors.median() < 0.1), (dtype, chunk, len(row), errors)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_decodes_what_the_steps_by_hand_do(kind: str, tmp_path: Path) -> None:
    save(tmp_path, kind)
    model = load_model(tmp_path, device="cuda", dtype="float32")
    want, _ = run_greedy(model, ROWS, 24, page_size=16)
    llm = nv.LLM(model, num_pages=64, max_num_batched_tokens=40)
    params = nv.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert [out.token_ids for out in llm.generate([list(row) for row in ROWS], params)] == want
    assert [out.token_ids for out in llm.generate([list(row) for row in ROWS], params)] == want  # prefixes found


def test_one_warning_and_no_graphs(tmp_path: Path) -> None:
    save(tmp_path, "stablelm")
    with pytest.warns(UserWarning, match="StableLmForCausalLM has no built-in implementation.*slow") as told:
        nv.LLM(load_model(tmp_path, device="cuda"), num_pages=16)
    assert len(told) == 1
