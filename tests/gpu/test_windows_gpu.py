"""Frames on a GPU: captured steps, plans of FlashInfer and cascades over two KV pools draw what a CPU draws with masks alone."""

import random

import pytest
import torch

import nanovllm as nv
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.models.fast import fused
from nanovllm.ops.backends import attention_backend
from nanovllm.state.invariants import check
from nanovllm.testing.driver import layout, run_chunks, run_greedy
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZES = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}
WINDOWS = {"all": (96, 96, 96, 96), "some": (96, 0, 96, 0), "two": (96, 0, 32, 0)}
MODELS = [*(("Qwen3ForCausalLM", windows) for windows in WINDOWS.values()), ("Gemma3ForCausalLM", WINDOWS["some"])]


def greedy(count: int) -> nv.SamplingParams:
    return nv.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS, ids=[*WINDOWS, "gemma3"])
def model(request: pytest.FixtureRequest) -> nv.Model:
    """Bfloat16, as FlashInfer wants it."""
    architecture, windows = request.param
    return random_model(tiny_config(architecture, windows=windows, num_layers=4, **SIZES), dtype="bfloat16", device=CUDA, std=0.05)


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(264) for _ in range(length)] for length in lengths]


def engine(model: nv.Model, num_frames: int, **options) -> nv.EngineState:
    """Pages enough, and so many frames."""
    pages = {} if model.config.all_windowed else {"num_pages": 1024}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096, **pages, **options}
    return nv.init_state(model, num_frames=num_frames, page_size=16, **limits)


def serve(model: nv.Model, state: nv.EngineState, asked: list[list[int]], count: int) -> tuple[nv.EngineState, list[list[int]]]:
    ids, drawn = [], {}
    for prompt in asked:
        state, rid = nv.submit(model, state, prompt, greedy(count))
        ids.append(rid)
    while state.running or state.waiting:
        state, outs = nv.step(model, state)
        drawn.update({out.request_id: out.output.token_ids for out in outs if out.output is not None})
    check(state)
    return state, [drawn[rid] for rid in ids]


def require_likely(model: nv.Model, prompt: list[int], drawn: list[int]) -> None:
    """Each token is the likeliest within what kernels may differ in, by a forward that keeps all KV and only masks."""
    logits = _scored(model, prompt + drawn[:-1], len(prompt) - 1)
    short = logits.amax(1) - logits.gather(1, torch.tensor(drawn, device=CUDA)[:, None])[:, 0]
    assert short.amax().item() < 0.25, (len(prompt), short.tolist())


def _scored(model: nv.Model, tokens: list[int], start: int) -> torch.Tensor:
    (logits,) = run_chunks(model, [tokens], layout(model, [len(tokens)], 16), len(tokens))
    return logits[start:].float()


def test_a_gpu_with_flashinfer_runs_these(model: nv.Model) -> None:
    assert attention_backend(CUDA, model.dtype, 64, 16) == "flashinfer"
    assert isinstance(engine(model, 64).runtime.executor, GraphExecutor) and fused.serves(model.params, model.config)


@pytest.mark.parametrize("num_frames", [24, 64, 400])
def test_tokens_are_those_of_masks_alone(model: nv.Model, num_frames: int) -> None:
    """Prompts longer than the frames, captured steps, steps ahead, short extensions, preemption."""
    asked, state = prompts(700, 30, 5, 1500, 260, 90), engine(model, num_frames)
    for _ in range(2):  # the second time over what is indexed, and has frames still
        state, drawn = serve(model, state, asked, 80)
        for prompt, tokens in zip(asked, drawn, strict=True):
            require_likely(model, prompt, tokens)


@pytest.mark.parametrize("cascade", [None, True, False])
def test_shared_pages(model: nv.Model, cascade: bool | None) -> None:
    (system,), ends = prompts(640), prompts(3, 20, 70, 200)
    state = engine(model, 400, cascade=cascade)
    state, root = nv.prefill(model, state, system)
    state, gens = nv.generate_many(model, state, [[root, end] for end in ends], greedy(120))
    for end, gen in zip(ends, gens, strict=True):
        require_likely(model, system + end, gen.token_ids)
    check(state)


def test_sessions_and_moved_chunks(model: nv.Model) -> None:
    first, second = prompts(200, 130)
    state = engine(model, 200)
    state, one = nv.prefill(model, state, first)
    state, carry = nv.begin(model, state, [[one, second], second], greedy(40), room=40)
    for _ in range(40):
        carry, _ = nv.decode_step(model.params, carry, model.config)
    state, gens = nv.commit(model, state, carry)
    require_likely(model, first + second, gens[0].token_ids)
    require_likely(model, second, gens[1].token_ids)
    state, two = nv.prefill(model, state, second)
    state, whole = nv.compose(model, state, [one, two], recompute="all")
    state, reply = nv.generate(model, state, [whole, [5]], greedy(20))
    require_likely(model, [*first, *second, 5], reply.token_ids)
    state, moved = nv.compose(model, state, [one, two])
    state, back = nv.drop(model, state, moved, 0, len(one), "shift")
    frames = state.pool.frames
    for pool, framed in zip(state.kv.pools, (True,) if frames.alone else (False, True), strict=True):
        tables = (chunk.pages.array().copy() for chunk in (two, back))
        a, b = (torch.from_numpy(frames.of(table) if framed else table).to(CUDA) for table in tables)
        held, again = (pool[:, t].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : len(second)].float() for t in (a, b))
        torch.testing.assert_close(held, again, rtol=0.05, atol=0.05)  # keys turned there and back in bfloat16
    check(state)


def test_files_carry_both_pools(model: nv.Model, tmp_path) -> None:
    (tokens,) = prompts(333)
    state, other = engine(model, 100), engine(model, 100, max_num_seqs=4)
    state, chunk = nv.prefill(model, state, tokens)
    nv.save_chunk(state, chunk, tmp_path / "chunk.safetensors")
    other, loaded = nv.load_chunk(model, other, tmp_path / "chunk.safetensors")
    _, a = nv.generate(model, state, [chunk, [1, 2]], greedy(16))
    _, b = nv.generate(model, other, [loaded, [1, 2]], greedy(16))
    assert a.token_ids == b.token_ids


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_a_cpu_draws_the_same_from_the_same_weights() -> None:
    config = tiny_config("Gemma3ForCausalLM", windows=(32, 0))
    cpu = random_model(config)
    asked = prompts(100, 40)
    wanted, _ = run_greedy(cpu, asked, 12, page_size=16)
    gpu = random_model(config, device=CUDA)  # float32: plain torch attention, no graphs
    with pytest.warns(UserWarning):
        state = nv.init_state(gpu, num_pages=64, num_frames=12, max_num_seqs=4)
    assert serve(gpu, state, asked, 12)[1] == wanted
