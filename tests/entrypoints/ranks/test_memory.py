"""A rank that lacks the memory of a pass says so before it begins: all ranks lower the budget alike, and the engine lives."""

from typing import Any

import pytest

import nanovllm as nv
from nanovllm.engine.requests import submit_many
from nanovllm.executor import agreed_memory
from tests.entrypoints.ranks.engines import LIMITS, started
from tests.entrypoints.ranks.hooks import Short

pytestmark = pytest.mark.unhooked
PROMPTS = ["Once upon a time there was", "Hello", "The king of Aistonia is Oswin."]
GREEDY = nv.SamplingParams(temperature=0, max_tokens=12)
EIGHT, OTHERS = list(range(300, 308)), list(range(400, 408))


def replies(llm: nv.LLM) -> list[Any]:
    """Greedy replies to `PROMPTS`."""
    return [(out.token_ids, out.finish_reason) for out in llm.generate(PROMPTS, GREEDY)]


def test_all_ranks_lower_the_budget_if_one_lacks_memory() -> None:
    """Digests of the whole states are compared after every call."""
    alone = replies(nv.LLM("tiny", **LIMITS))
    with started("short_before_a_pass", grouped=True) as llm:
        llm.state, _ = nv.submit(llm.model, llm.state, EIGHT * 4, GREEDY)
        llm.state, _ = nv.step(llm.model, llm.state)
        assert llm.state.stats.memory_shortages == 1 and llm.state.token_budget == 16 and llm.state.stats.prefill_tokens == 16
        assert replies(llm) == alone
        assert llm.state.stats.memory_shortages == 2 and not llm.state.running


def test_rank_0_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replies(nv.LLM("tiny", **LIMITS))
    with started(grouped=True) as llm:
        monkeypatch.setattr(agreed_memory, "take_memory", Short(range(2, 8, 5)))
        assert replies(llm) == alone
        assert llm.state.stats.memory_shortages == 2


def test_a_request_ends_for_which_there_is_no_memory_at_all_and_the_others_go_on() -> None:
    (alone,) = nv.LLM("tiny", **LIMITS).generate([OTHERS], GREEDY)
    with started("short_for_five_passes", grouped=True) as llm:
        llm.state, (first, second) = submit_many(llm.model, llm.state, [EIGHT, OTHERS], [GREEDY, GREEDY])
        ended = dict[int, nv.RequestOutput]()
        while len(ended) < 2:
            llm.state, outputs = nv.step(llm.model, llm.state)
            ended |= {out.request_id: out.output for out in outputs if out.output is not None}
        assert isinstance(ended[first].error, nv.OutOfPagesError) and ended[first].finish_reason == "error"
        assert "out of memory on rank 1 of 2: a pass of 1 tokens does not fit" in str(ended[first].error)
        assert ended[second].token_ids == alone.token_ids and llm.state.stats.memory_shortages == 5


def test_a_call_without_steps_raises_alike_and_can_be_repeated() -> None:
    with started("short_before_a_pass", grouped=True) as llm:
        with pytest.raises(nv.OutOfPagesError, match="the device ran out of memory"):
            nv.prefill(llm.model, llm.state, "The king of Aistonia is Oswin.")
        llm.state, chunk = nv.prefill(llm.model, llm.state, "The king of Aistonia is Oswin.")
        assert len(chunk)
