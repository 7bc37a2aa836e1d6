"""The op that a traced decode step becomes: its schema, its results, the weights that it honours, and how often it is traced."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.executor.step_program import StepProgram, tensors_of
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.compile
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def begun(model: nv.Model, rows: int) -> tuple[nv.EngineState, nv.DecodeCarry]:
    state = nv.init_state(model, num_pages=128, page_size=4, max_model_len=64)
    return nv.begin(model, state, [[1 + row, 2, 3] for row in range(rows)], GREEDY, room=6)


def arguments(model: nv.Model, carry: nv.DecodeCarry) -> tuple[Any, ...]:
    batch = carry.batch if carry.prompt is None else carry.prompt
    windowed = batch.windowed
    assert isinstance(carry.forward, StepProgram)
    return (
        tensors_of(model.params), carry.kv.pools[0], carry.kv.pools[1] if len(carry.kv.pools) > 1 else None, batch.input_ids,
        batch.positions, batch.slots, batch.page_tables, batch.seq_lens, batch.cu_seqlens, batch.logit_indices,
        None if windowed is None else windowed.page_tables,
        None if windowed is None else windowed.slots, batch.plan, 0 if windowed is None else windowed.plan, carry.forward.handle,
        model.config.vocab_size, model.dtype,
    )  # fmt: skip


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM"])
def test_opcheck(architecture: str):
    model = random_model(tiny_config(architecture), 0)
    _, carry = begun(model, 3)
    torch.library.opcheck(torch.ops.nanovllm.step_logits.default, arguments(model, carry))


@pytest.mark.parametrize("windows", [(), (8, 0)])
def test_opcheck_of_prompts(windows: tuple[int, ...]):
    model = random_model(tiny_config(windows=windows), 0)
    state = nv.init_state(model, num_pages=128, page_size=4, max_model_len=64)
    _, carry = nv.begin(model, state, [[1, 2, 3], [4]], GREEDY, room=6, fill=False)
    torch.library.opcheck(torch.ops.nanovllm.step_logits.default, arguments(model, carry))


@pytest.mark.parametrize("windows", [(), (8, 0), (8, 8)])
def test_the_op_is_the_forward_function(windows: tuple[int, ...]):
    model = random_model(tiny_config(windows=windows), 0)
    _, carry = begun(model, 2)
    pools = tuple(pool.clone() for pool in carry.kv.pools)
    want, after = nv.forward(model.params, nv.KVState(pools=pools), carry.batch, model.config)
    assert torch.equal(torch.ops.nanovllm.step_logits.default(*arguments(model, carry)), want)
    assert all(map(torch.equal, carry.kv.pools, after.pools))


def test_other_weights_than_the_engines_are_honoured():
    model, other = random_model(tiny_config(), 0), random_model(tiny_config(), 1)
    _, carry = begun(model, 2)
    step = torch.compile(lambda params, carry: nv.decode_step(params, carry, model.config)[1].logits, fullgraph=True, backend="eager")
    pools = tuple(pool.clone() for pool in carry.kv.pools)
    want, _ = nv.forward(other.params, nv.KVState(pools=pools), carry.batch, model.config)
    assert torch.equal(step(other.params, carry), want)


def test_another_config_than_the_engines_is_honoured():
    model = random_model(tiny_config(), 0)
    other = replace(model.config, logit_softcap=0.5)
    _, carry = begun(model, 2)
    step = torch.compile(lambda params, carry: nv.decode_step(params, carry, other)[1].logits, fullgraph=True, backend="eager")
    pools = tuple(pool.clone() for pool in carry.kv.pools)
    want, _ = nv.forward(model.params, nv.KVState(pools=pools), carry.batch, other)
    got = step(model.params, carry)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert got.abs().max() <= 0.5


def test_weights_of_a_program_are_put_back_in_their_places():
    model = random_model(tiny_config("Qwen3MoeForCausalLM"), 0)
    program = StepProgram(model, nv.forward)
    assert program.params_of(tensors_of(model.params)) is model.params
    copies = [weight.clone() for weight in tensors_of(model.params)]
    rebuilt = program.params_of(copies)
    assert type(rebuilt) is type(model.params) and rebuilt is not model.params
    assert all(one is other for one, other in zip(tensors_of(rebuilt), copies, strict=True))
    assert pytree.tree_structure(rebuilt) == pytree.tree_structure(model.params)


def test_a_step_is_one_node_however_many_layers():
    counts = []
    for num_layers in (1, 4):
        model = random_model(tiny_config(num_layers=num_layers), 0)
        _, carry = begun(model, 2)
        torch._dynamo.reset()
        backend = CompileCounterWithBackend("eager")
        torch.compile(lambda params, carry, model=model: nv.decode_step(params, carry, model.config), backend=backend, fullgraph=True)(
            model.params, carry
        )
        (graph,) = backend.graphs
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert names.count("nanovllm.step_logits.default") == 1 and not any("kv_write" in name for name in names)
        counts.append(len(names))
    assert counts[0] == counts[1]


def test_one_more_compilation_serves_any_number_of_rows():
    model, counter = random_model(tiny_config(num_layers=1), 0), CompileCounterWithBackend("eager")
    state = nv.init_state(model, num_pages=256, page_size=4, max_model_len=32)
    step = torch.compile(lambda params, carry: nv.decode_step(params, carry, model.config)[0], fullgraph=True, backend=counter)
    for rows, compilations in ((1, 1), (3, 2), (8, 2), (64, 2), (2, 2), (1, 2)):
        state, carry = nv.begin(model, state, [[1 + row, 2, 3] for row in range(rows)], GREEDY, room=4)
        for _ in range(3):
            carry = step(model.params, carry)
        state, _ = nv.commit(model, state, carry)
        assert counter.frame_count == compilations
