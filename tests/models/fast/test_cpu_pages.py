"""The decode step in C: its bits do not depend on how tokens lie in pages."""

from typing import Any

import pytest

import nanovllm as nv
from nanovllm.testing.models import random_model, tiny_config

PARAMS = nv.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_any_page_size_gives_the_same_bits(dtype: str, kv_dtype: Any) -> None:
    model = random_model(tiny_config("Qwen3ForCausalLM"), dtype=dtype)
    for length in (5, 9, 17, 23):
        prompt = [place * 7 % model.config.vocab_size for place in range(length)]
        found = []
        for page_size in (16, 7, 5, 4):
            state = nv.init_state(model, num_pages=32, page_size=page_size, kv_dtype=kv_dtype)
            _, reply = nv.generate(model, state, prompt, PARAMS)
            found.append([entry.logprob for entry in reply.logprobs or ()])
        assert found == [found[0]] * 4 and len(found[0]) == 6, length
