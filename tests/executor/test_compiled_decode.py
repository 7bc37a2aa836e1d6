"""`decode_step` inside the caller's compiled program: one graph, no copy of the KV, the tokens of `generate`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import nanovllm as nv
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.ops.linear.quantise import KINDS, Kind
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.compile

CONTEXTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3]]
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SAMPLED = nv.SamplingParams(temperature=0.9, top_k=12, top_p=0.9, seed=5, max_tokens=8, ignore_eos=True, presence_penalty=0.5)


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return random_model(tiny_config(num_layers=1), 0)


def state_of(model: nv.Model) -> nv.EngineState:
    return nv.init_state(model, num_pages=64, page_size=4, max_model_len=64)


def two_steps(model: nv.Model, **options: Any) -> Any:
    def run(params: Any, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, torch.Tensor]:
        carry, first = nv.decode_step(params, carry, model.config, **options)
        carry, second = nv.decode_step(params, carry, model.config, **options)
        return carry, torch.stack((first.token_ids, second.token_ids), 1)

    return torch.compile(run, fullgraph=True)


@pytest.mark.parametrize("options", [{}, {"forward": nv.forward}], ids=["as the engine runs", "layer by layer"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_two_steps_trace_in_one_region(architecture: str, options: dict[str, Any]):
    model = random_model(tiny_config(architecture), 0)
    state, want = nv.generate_many(model, state_of(model), CONTEXTS, GREEDY)
    state, carry = nv.begin(model, state, CONTEXTS, GREEDY, room=8)
    address, run, drawn = carry.kv.pools[0].data_ptr(), two_steps(model, **options), []
    for _ in range(4):
        carry, tokens = run(model.params, carry)
        drawn.append(tokens)
    assert carry.kv.pools[0].data_ptr() == address
    state, gens = nv.commit(model, state, carry)
    nv.check(state)
    assert torch.cat(drawn, 1).tolist() == [g.token_ids for g in gens] == [g.token_ids for g in want]


@pytest.mark.parametrize("options", [{}, {"forward": nv.forward}], ids=["as the engine runs", "layer by layer"])
@pytest.mark.parametrize("head", [False, True], ids=["plain head", "rounded head"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_trace_in_one_region(kind: Kind, head: bool, options: dict[str, Any]):
    """The codes and scales are inputs of the graph, and the tokens and log-probabilities are those of the uncompiled step."""
    plain = random_model(tiny_config(num_layers=1), 0)
    params = rounded_params(plain.params, Rounding(kind=kind, head=head))
    model = replace(plain, params=params, fingerprint=kind)
    assert isinstance(params.layers[0].qkv, QuantisedMatrix) and isinstance(params.head, QuantisedMatrix) == head
    asked = replace(GREEDY, logprobs=0)

    def one_step(params: Any, carry: nv.DecodeCarry) -> tuple[nv.DecodeCarry, nv.DecodeOutput]:
        return nv.decode_step(params, carry, model.config, **options)

    torch.compiler.reset()  # each case compiles the same code, and their number has a limit
    counter = CompileCounterWithBackend("inductor")
    found = []
    for step in (one_step, torch.compile(one_step, fullgraph=True, backend=counter)):
        state, carry = nv.begin(model, state_of(model), CONTEXTS, asked, room=4)
        tokens, logprobs = [], []
        for _ in range(4):
            carry, out = step(params, carry)
            tokens.append(out.token_ids)
            logprobs.append(out.logprobs)
        nv.check(nv.commit(model, state, carry)[0])
        found.append((torch.stack(tokens), torch.stack(logprobs)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)
    _, want = nv.generate_many(model, state_of(model), CONTEXTS, replace(asked, max_tokens=4))
    assert found[0][0].T.tolist() == [g.token_ids for g in want]
    assert counter.frame_count <= 2  # the second after the buffers of the first step became those of a step


def test_sampled_steps_equal_generate(model: nv.Model):
    state, want = nv.generate_many(model, state_of(model), CONTEXTS, SAMPLED)
    state, carry = nv.begin(model, state, CONTEXTS, SAMPLED, room=8)
    run = two_steps(model)
    for _ in range(4):
        carry, _ = run(model.params, carry)
    state, gens = nv.commit(model, state, carry)
    assert [g.token_ids for g in gens] == [g.token_ids for g in want]


@pytest.mark.parametrize(
    ("options", "ops"), [({}, {"step_logits"}), ({"forward": nv.forward}, {"kv_write", "paged_decode"})], ids=["engine", "layers"]
)
def test_the_generated_code_never_copies_the_pages(model: nv.Model, options: dict[str, Any], ops: set[str]):
    _, carry = nv.begin(model, state_of(model), CONTEXTS, GREEDY, room=2)
    shape = tuple(carry.kv.pools[0].shape)
    _, code = run_and_get_code(two_steps(model, **options), model.params, carry)
    source = "\n".join(code)
    assert all(f"nanovllm.{name}" in source for name in ops)
    # A buffer of the pool's size is only ever the argument itself.
    assert f"empty_strided_cpu({shape}" not in source and f"empty_strided({shape}" not in source
    assert source.count(str(shape)) <= 2 * len(code)


def test_forced_tokens_are_scored(model: nv.Model):
    state, carry = nv.begin(model, state_of(model), CONTEXTS[:1], nv.SamplingParams(temperature=0.0, logprobs=0), room=4)
    text = torch.tensor([[3, 1, 4, 1]], dtype=torch.int32)

    def score(params: Any, carry: nv.DecodeCarry, text: torch.Tensor) -> tuple[nv.DecodeCarry, torch.Tensor]:
        total = torch.zeros(text.shape[0])
        for i in range(4):
            carry, out = nv.decode_step(params, carry, model.config, token_ids=text[:, i])
            assert out.logprobs is not None
            total = total + out.logprobs
        return carry, total

    carry, total = torch.compile(score, fullgraph=True)(model.params, carry, text)
    state, gens = nv.commit(model, state, carry)
    expected, context = 0.0, CONTEXTS[0]
    for token in text[0].tolist():
        bias = nv.SamplingParams(temperature=0.0, max_tokens=1, logit_bias={token: 100.0}, logprobs=0, ignore_eos=True)
        state, gen = nv.generate(model, state, context, bias)
        assert gen.token_ids == [token] and gen.logprobs is not None
        expected += gen.logprobs[0].logprob
        context = [*context, token]
    assert abs(float(total) - expected) < 1e-4
    assert gens[0].chunk.token_ids.tolist() == [*CONTEXTS[0], 3, 1, 4, 1]


def test_prompts_and_steps_trace_in_one_region(model: nv.Model):
    """A pipeline from prompts to tokens, as one graph. Another length of prompts compiles once more, and so does another number of rows."""
    counter = CompileCounterWithBackend("inductor")

    def pipeline(params: Any, carry: nv.DecodeCarry) -> nv.DecodeCarry:
        for _ in range(4):
            carry, _ = nv.decode_step(params, carry, model.config)
        return carry

    run, state = torch.compile(pipeline, fullgraph=True, backend=counter), state_of(model)
    for lengths in ((5, 1, 7), (3, 9, 2), (8, 8), (4, 2, 6, 11)):
        contexts = [[(7 * row + i) % 100 for i in range(length)] for row, length in enumerate(lengths)]
        _, want = nv.generate_many(model, state_of(model), contexts, GREEDY)
        state, carry = nv.begin(model, state, contexts, GREEDY, room=4, fill=False)
        address = carry.kv.pools[0].data_ptr()
        carry = run(model.params, carry)
        assert carry.kv.pools[0].data_ptr() == address
        state, gens = nv.commit(model, state, carry)
        nv.check(state)
        assert [g.token_ids for g in gens] == [g.token_ids[:4] for g in want]
    assert counter.frame_count <= 3
    (names,) = {tuple(str(node.target) for node in graph.graph.nodes if "step_logits" in str(node.target)) for graph in counter.graphs}
    assert len(names) == 4
