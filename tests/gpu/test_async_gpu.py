"""`AsyncLLM` on a GPU: graphs that the constructor's thread captured are replayed by the engine's thread, with the replies of `LLM`."""

import asyncio

import pytest

import nanovllm as nv
from tests.gpu.small import random_prompts, small_model

pytestmark = pytest.mark.gpu


def test_replies_are_those_of_llm() -> None:
    model = small_model()
    prompts, params = random_prompts(model, 5, 40, 17, 200), nv.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [output.token_ids for output in nv.LLM(model, num_pages=512).generate(prompts, params)]

    async def main() -> list[list[int]]:
        async with asyncio.timeout(120), nv.AsyncLLM(model, num_pages=512) as llm:
            outputs = await llm.generate(prompts, params)
            stream = llm.stream(prompts[1], params)
            await anext(stream)
            await stream.aclose()  # in the middle of steps that run ahead
            while llm.state.running:
                await asyncio.sleep(0.001)
            assert llm.state.pool.num_available == llm.state.config.num_pages
            assert [len(output.token_ids) for output in await llm.generate(prompts, params)] == [40] * 4
            return [output.token_ids for output in outputs]

    assert asyncio.run(main()) == expected
