"""Decode steps that run before they are asked for: all that runs is counted."""

from dataclasses import replace

import nanovllm as nv
from nanovllm.compile import Drawn, EagerExecutor, Runtime
from nanovllm.decode import DecodeCarry
from nanovllm.model import Model
from nanovllm.testing.ahead import AheadExecutor
from nanovllm.testing.models import random_model, tiny_config

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11]]


class Counting(EagerExecutor):
    """Counts the tokens that decode steps run."""

    rows = 0

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        self.rows += carry.active.shape[0]
        return super().decode(model, carry)


def run(ahead: bool, params: nv.SamplingParams) -> tuple[list[list[int]], nv.EngineState, Counting]:
    model = random_model(tiny_config())
    state = nv.init_state(model, num_pages=40, page_size=4, max_num_seqs=3)
    counting = Counting(4, 40)
    state = replace(state, runtime=Runtime(state.runtime.lease, AheadExecutor(counting, 4) if ahead else counting))
    state, gens = nv.generate_many(model, state, PROMPTS, [replace(params, max_tokens=6 + 3 * i) for i in range(3)])
    return [gen.token_ids for gen in gens], state, counting


def test_all_that_runs_is_counted_and_draws_the_same() -> None:
    # The fifth token of a reply ends it: not known before it is drawn, so the step behind it was run in vain.
    for params in (
        nv.SamplingParams(temperature=0, ignore_eos=True),
        nv.SamplingParams(temperature=0.9, seed=5, logprobs=2, ignore_eos=True),
        nv.SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.5, ignore_eos=True),
    ):
        plain, before, _ = run(False, params)
        stop = (plain[1][4],)
        stopping = replace(params, stop_token_ids=stop)
        plain, before, counted = run(False, stopping)
        ahead, after, counting = run(True, stopping)
        assert ahead == plain
        executor = after.runtime.executor
        assert isinstance(executor, AheadExecutor)
        waiting = 0 if executor.ready is None else len(executor.ready[1].token_ids)
        assert counting.rows - counted.rows == after.stats.discarded_tokens + waiting + executor.unused
        assert before.stats.decode_tokens == after.stats.decode_tokens - after.stats.discarded_tokens
        if not params.frequency_penalty:
            assert after.stats.discarded_tokens > 0
