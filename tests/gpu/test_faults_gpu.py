"""Faults of a real device: memory that is taken by others, and a kernel that fails, after which the process cannot use the device."""

import subprocess
import sys
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.engine.requests import submit_many
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import drain
from tests.gpu.small import random_prompts, require_same

pytestmark = pytest.mark.gpu

LIMITS: dict[str, Any] = {"num_pages": 2200, "page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 16384, "max_model_len": 16384}
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MIB = 1 << 20
WIDE: dict[str, Any] = {"hidden_size": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 8192}


def test_memory_that_others_take_makes_steps_smaller_and_ends_no_reply():
    """A step of a long prompt needs some hundred MiB for its activations; 48 MiB are left."""
    model = random_model(tiny_config(**WIDE, max_position_embeddings=16384), 0, "bfloat16", device="cuda", std=0.02)
    prompts = random_prompts(model, 12_000, 40, 700)
    state = nv.init_state(model, **LIMITS)
    state, want = nv.generate_many(model, state, prompts, GREEDY)
    state = nv.init_state(model, **LIMITS)
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 48 * MIB
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        state, ids = submit_many(model, state, prompts, [GREEDY] * len(prompts))
        state, got = drain(model, state)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    nv.check(state)
    assert state.stats.memory_shortages > 0
    for prompt, request_id, one in zip(prompts, ids, want, strict=True):
        assert got[request_id].error is None
        require_same(model, prompt, got[request_id].token_ids, one.token_ids, LIMITS)
    state, _ = nv.generate_many(model, state, prompts, GREEDY)  # with memory again
    nv.check(state)


PROGRAM = """
import torch
import nanovllm as nv
from nanovllm.testing.models import random_model, tiny_config

model = random_model(tiny_config(vocab_size=64, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=256), 0, "bfloat16", device="cuda")
state = nv.init_state(model, num_pages=64, max_num_seqs=4)
greedy = nv.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
for prompt in ([1, 2, 3], [4, 5]):
    state, _ = nv.submit(model, state, prompt, greedy)
for _ in range(4):
    state, _ = nv.step(model, state)
torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]  # a device-side assertion, told by a later call
said = []
for call in (
    lambda: nv.step(model, state),
    lambda: nv.step(model, state),
    lambda: nv.submit(model, state, [1], greedy),
    lambda: nv.prefill(model, state, [1, 2]),
):
    for _ in range(40):
        try:
            state = call()[0]
        except nv.EngineDeadError as error:
            said.append(str(error).splitlines()[0])
            break
print(len(said), len(set(said)), "device-side assert" in said[0])
"""


def test_a_kernel_that_fails_ends_the_engine_with_one_typed_error():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout.split() == ["4", "1", "True"], run.stdout + run.stderr[-3000:]
