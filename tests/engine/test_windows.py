"""Layers with windows keep their KV in frames: the same tokens as with masks alone, in less memory."""

import random
from pathlib import Path

import pytest
import torch

import nanovllm as nv
from nanovllm.chunks.handles import detach
from nanovllm.config import EngineConfig
from nanovllm.engine.requests import submit_many
from nanovllm.entrypoints.memory.report import memory
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.state.invariants import check
from nanovllm.state.kv_cache import bytes_by_group, pages_for
from nanovllm.state.pool_sizes import bytes_of, frames_for_all, pool_sizes
from nanovllm.state.window_frames import least_frames, num_retired
from nanovllm.testing.driver import run_greedy
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
ARCHITECTURES = ("MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
MODELS = {name: random_model(tiny_config(name)) for name in ARCHITECTURES}
MISTRAL, GEMMA = MODELS["MistralForCausalLM"], MODELS["Gemma3ForCausalLM"]
WINDOW, SIZE = 8, 4
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(264) for _ in range(length)] for length in (30, 5, 61, 17, 3)]


def greedy(count: int) -> nv.SamplingParams:
    return nv.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def engine(model: nv.Model, num_frames: int | None = None, **options) -> nv.EngineState:
    """An engine with enough pages, and so many frames."""
    pages = {} if model.config.all_windowed and num_frames is not None else {"num_pages": 120}
    return nv.init_state(model, **{"num_frames": num_frames, "page_size": SIZE, "compile": False, **pages, **options})


def masked(model: nv.Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What the model draws where all KV stays and windows are masks alone."""
    return run_greedy(model, prompts, count, page_size=SIZE)[0]


def serve(model: nv.Model, state: nv.EngineState, prompts: list[list[int]], count: int) -> tuple[nv.EngineState, list[list[int]]]:
    """All prompts by `submit` and `step`, every state looked at."""
    ids, drawn = [], {}
    for prompt in prompts:
        state, rid = nv.submit(model, state, prompt, greedy(count))
        ids.append(rid)
    while state.running or state.waiting:
        state, outs = nv.step(model, state)
        check(state)
        drawn.update({out.request_id: out.output.token_ids for out in outs if out.output is not None})
    return state, [drawn[rid] for rid in ids]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("num_frames", [least_frames(WINDOW, SIZE), 5, 12, pytest.param(60, marks=pytest.mark.long)])
def test_the_same_tokens_whatever_the_frames(model, num_frames):
    wanted = masked(model, PROMPTS, 10)
    for budget in (7, 64):
        state = engine(model, num_frames, max_num_batched_tokens=budget)
        state, drawn = serve(model, state, PROMPTS, 10)
        assert drawn == wanted
        state, again = serve(model, state, PROMPTS, 10)  # with what the index and spare frames still have
        assert again == wanted
        assert state.pool.num_available == min(state.config.num_pages, num_frames)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_compiled_and_plain_executors_and_cascades_agree(model):
    wanted = masked(model, PROMPTS, 6)
    for options in ({"compile": None}, {"cascade": True}):
        assert serve(model, engine(model, 20, **options), PROMPTS, 6)[1] == wanted


def test_a_prompt_many_times_longer_than_the_pool():
    prompt = [DRAW.randrange(264) for _ in range(400)]
    state = nv.init_state(MISTRAL, num_pages=6, page_size=SIZE, compile=False)
    assert state.config.num_frames == 6 and len(state.kv.pools) == 1 and state.kv.pools[0].shape[1] == 7
    state, (drawn,) = serve(MISTRAL, state, [prompt], 20)
    assert [drawn] == masked(MISTRAL, [prompt], 20)
    assert state.stats.rerun_tokens == 0 and state.stats.prefill_tokens == 400


def test_a_chunk_keeps_all_its_kv_and_is_refused_where_it_cannot():
    state = nv.init_state(MISTRAL, num_pages=6, page_size=SIZE, compile=False)
    with pytest.raises(InvalidRequestError, match="25 tokens; this engine holds at most 24"):
        nv.prefill(MISTRAL, state, list(range(25)))
    state, chunk = nv.prefill(MISTRAL, state, list(range(20)))
    assert all(state.pool.frames.needs[page] == 1 for page in chunk.pages)
    with pytest.raises(OutOfPagesError, match="1 of 6 frames"):
        nv.prefill(MISTRAL, state, list(range(100, 110)))
    with pytest.raises(InvalidRequestError, match="at most 24"):
        submit_many(MISTRAL, state, [list(range(30))], [greedy(2)], keep=True)
    state, _ = nv.submit(MISTRAL, state, list(range(30)), greedy(2))
    outs = []
    while not outs:
        state, outs = nv.step(MISTRAL, state)
    assert isinstance(outs[0].error, OutOfPagesError) and "release chunks" in str(outs[0].error)
    check(state)
    assert nv.release(state, chunk).pool.num_available == 6


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_whole_replies_sessions_and_chunks_of_chunks(model, tmp_path: Path):
    prompt, more = PROMPTS[2], PROMPTS[3]
    (wanted,) = masked(model, [prompt + more], 6)
    state = engine(model, 80)
    state, chunk = nv.prefill(model, state, prompt)
    state, reply = nv.generate(model, state, [chunk, more], greedy(6))
    assert reply.token_ids == wanted
    state, carry = nv.begin(model, state, [[chunk, more], [chunk, more[:3]]], greedy(6), room=6)
    for _ in range(6):
        carry, _ = nv.decode_step(model.params, carry, model.config)
    state, replies = nv.commit(model, state, carry)
    assert replies[0].token_ids == wanted and replies[1].token_ids == masked(model, [prompt + more[:3]], 6)[0]
    state, twin = nv.fork(state, chunk)
    state, head = nv.truncate(state, chunk, 38)
    state = nv.release(state, chunk)
    state, cut = nv.generate(model, state, [head, more], greedy(6))
    assert cut.token_ids == masked(model, [prompt[:38] + more], 6)[0]
    state, whole = nv.compose(model, state, [head, twin], recompute="all")
    state, kept = nv.drop(model, state, whole, 30, 38)
    tokens = prompt[:30] + prompt
    state, dropped = nv.generate(model, state, [kept, more], greedy(6))
    assert dropped.token_ids == masked(model, [tokens + more], 6)[0]
    nv.save_chunk(state, twin, tmp_path / "chunk.safetensors")
    other = engine(model, 90, page_size=3, num_pages=140 if not model.config.all_windowed else None)
    other, loaded = nv.load_chunk(model, other, tmp_path / "chunk.safetensors")
    other, again = nv.generate(model, other, [loaded, more], greedy(6))
    assert again.token_ids == wanted
    check(state)
    check(other)


def test_moved_keys_of_both_groups_turn_by_their_own_speeds():
    """A chunk moved behind another holds the keys of its tokens run there alone, in layers that turn fast and in those that turn slowly."""
    state = engine(GEMMA, 60)
    state, first = nv.prefill(GEMMA, state, PROMPTS[3])
    state, second = nv.prefill(GEMMA, state, PROMPTS[0])
    state, joined = nv.compose(GEMMA, state, [first, second])
    state, shifted = nv.drop(GEMMA, state, joined, 0, len(first), "shift")  # back where it came from
    size, frames = SIZE, state.pool.frames
    for pool, framed in zip(state.kv.pools, (False, True), strict=True):
        tables = [chunk.pages.array().copy() for chunk in (second, shifted)]
        a, b = (torch.from_numpy(frames.of(table) if framed else table) for table in tables)
        held, moved = (pool[:, table].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : len(second)] for table in (a, b))
        assert size * len(a) >= len(second)
        torch.testing.assert_close(held, moved, rtol=1e-4, atol=1e-4)


def test_moved_keys_of_the_first_layer_are_those_of_their_new_places():
    """The KV of the first layer does not depend on earlier tokens. This layer has a window, and frequencies of its own."""
    assert GEMMA.config.windows[0] and GEMMA.config.local_rope is not None
    state = engine(GEMMA, 60)
    state, first = nv.prefill(GEMMA, state, PROMPTS[3])
    state, second = nv.prefill(GEMMA, state, PROMPTS[0])
    state, joined = nv.compose(GEMMA, state, [first, second])
    state, whole = nv.prefill(GEMMA, state, PROMPTS[3] + PROMPTS[0])
    pool, index = GEMMA.config.places[0]
    found, wanted = (
        state.kv.pools[pool][index, torch.from_numpy(state.pool.frames.of(chunk.pages.array()))]
        .transpose(2, 3)
        .transpose(1, 2)
        .flatten(0, 1)
        for chunk in (joined, whole)
    )
    torch.testing.assert_close(found[: len(joined)], wanted[: len(joined)], rtol=1e-4, atol=1e-4)


def test_a_request_gets_the_frame_of_a_page_that_it_shares_with_a_waiting_one():
    """It has given up the frame and owns the page. If the other one gives up its pages, no page becomes free, but a frame does."""
    model = random_model(tiny_config(windows=(0, 3)))
    state = nv.init_state(model, num_pages=13, num_frames=3, page_size=1, max_model_len=20, max_num_batched_tokens=2)
    state, chunk = nv.prefill(model, state, [5])
    for tokens in ([6], [7, 8, 9, 10]):
        state, _ = nv.submit(model, state, [chunk, tokens], greedy(8))
    state, drawn = nv.release(state, chunk), list[int]()
    while state.running or state.waiting:
        state, outs = nv.step(model, state)
        check(state)
        drawn += [len(out.output.token_ids) for out in outs if out.output is not None]
    assert drawn == [8, 8]


def test_what_is_outside_of_the_window_is_given_up_as_a_reply_grows():
    state = engine(GEMMA, 40)
    state, _ = nv.submit(GEMMA, state, PROMPTS[2], greedy(100))
    for _ in range(90):
        state, _ = nv.step(GEMMA, state)
    (sequence,) = state.running
    frames = state.pool.frames
    assert frames.used.num_used - frames.spare.count <= least_frames(WINDOW, SIZE) + pages_for(64, SIZE) + 1
    assert sequence.retired >= (sequence.num_filled - WINDOW - 64) // SIZE
    report = memory(state)
    assert report.frames.num_saved >= sequence.retired and f"windows save {report.frames.num_saved}" in str(report)
    assert report.frames.num_needed + report.frames.num_spare + report.frames.num_free == 40
    assert "frames needed" in report.svg()


def test_a_prompt_is_found_again_while_its_window_has_frames():
    state = engine(MISTRAL, 20)
    state, _ = serve(MISTRAL, state, [PROMPTS[2]], 1)
    state, _ = serve(MISTRAL, state, [PROMPTS[2] + [1, 2, 3]], 1)
    assert state.stats.reused_tokens == 60  # whole pages of 61
    for length in (40, 44, 48):  # takes the frames of all others
        state, _ = serve(MISTRAL, state, [[DRAW.randrange(264) for _ in range(length)]], 1)
    before = state.stats.reused_tokens
    state, drawn = serve(MISTRAL, state, [PROMPTS[2] + [1, 2, 3]], 4)
    assert state.stats.reused_tokens == before
    assert drawn == masked(MISTRAL, [PROMPTS[2] + [1, 2, 3]], 4)
    # What was run again stands in the place of what was lost.
    state, _ = serve(MISTRAL, state, [PROMPTS[2] + [1, 2, 3]], 4)
    assert state.stats.reused_tokens > before + 50


def test_a_request_that_gives_pages_up_cannot_become_a_chunk():
    state = engine(MISTRAL, 20)
    state, rid = nv.submit(MISTRAL, state, PROMPTS[2], greedy(8))
    state, _ = nv.step(MISTRAL, state)
    with pytest.raises(InvalidRequestError, match="queue it with keep=True"):
        detach(MISTRAL, state, rid)
    state, (kept,) = submit_many(MISTRAL, state, [PROMPTS[0]], [greedy(8)], keep=True)
    for _ in range(4):
        state, _ = nv.step(MISTRAL, state)
    state, chunk = detach(MISTRAL, state, kept)
    assert chunk is not None
    check(state)


def test_streams_of_text():
    llm = nv.LLM(GEMMA, num_pages=60, num_frames=10, page_size=SIZE, compile=False)
    plain = nv.LLM(GEMMA, num_pages=60, num_frames=60, page_size=SIZE, compile=False)
    told = ["".join(piece.text for piece in each.stream("Once upon a time", greedy(30))) for each in (llm, plain)]
    assert told[0] == told[1]


def test_models_without_windows_have_one_pool_and_no_frames():
    model = random_model(tiny_config())
    state = nv.init_state(model, num_pages=4, page_size=SIZE)
    assert state.pool.frames is None and len(state.kv.pools) == 1 and state.config.num_frames == 0
    with pytest.raises(InvalidRequestError, match=r"num_frames=3: .* has no sliding-window layers"):
        nv.init_state(model, num_pages=4, num_frames=3)
    for wrong in (0, -1, True):
        with pytest.raises(InvalidRequestError, match="must be an integer of at least 1"):
            nv.init_state(GEMMA, num_pages=4, num_frames=wrong)


def test_sizes_by_themselves():
    """Neither pages nor frames are given."""
    for model in MODELS.values():
        state = nv.init_state(model, page_size=SIZE, max_num_seqs=2, max_num_batched_tokens=64, compile=False)
        assert state.config.num_frames >= min(128, frames_for_all(WINDOW, state.config)) and state.config.num_pages == 2 * 128
        assert serve(model, state, PROMPTS[:2], 4)[1] == masked(model, PROMPTS[:2], 4)


def test_five_windowed_layers_of_six_take_a_fraction_of_the_memory():
    windows = (16, 16, 16, 16, 16, 0)
    config = tiny_config("Gemma3ForCausalLM", num_layers=6, windows=windows, max_position_embeddings=2048)
    model = random_model(config)
    state = nv.init_state(model, num_pages=2048, page_size=4, max_num_seqs=4, max_num_batched_tokens=128, compile=False)
    full, windowed = state.kv.pools
    assert full.shape[:2] == (1, 2049) and windowed.shape[0] == 5
    held = sum(pool.numel() * pool.element_size() for pool in state.kv.pools)
    everything = 6 * full.numel() * full.element_size()
    assert held < everything / 2
    prompt = [DRAW.randrange(264) for _ in range(600)]
    (wanted,) = masked(model, [prompt], 8)
    assert serve(model, state, [prompt], 8)[1] == [wanted]


@pytest.mark.parametrize("windows", [(), (64, 64), (0, 64)])
def test_sizes_fit_the_budget_and_use_it(windows):
    config = tiny_config(windows=windows, max_position_embeddings=2048)
    limits = EngineConfig(num_pages=1, page_size=16, max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=256, seed=0, num_frames=1)
    page, frame = bytes_by_group(config, page_size=16, dtype=torch.float32)
    for budget in (10 * (page + frame), 100 * (page + frame), 400 * (page + frame), 1 << 40):
        pages, frames = pool_sizes(config, limits, None, None, budget, torch.float32)
        used = (pages if page else 0) * page + frames * frame
        assert used + page + frame <= budget
        most = 8 * 128
        if config.all_windowed:
            assert pages == most and frames <= max(128, frames_for_all(64, limits))
        elif windows:
            assert frames == min(pages, max(128, frames_for_all(64, limits)))
            assert pages == most or used + 2 * (page + frame) > budget - page - frame
        else:
            assert (pages, frames) == (min(most, budget // page - 1), 0)
    with pytest.raises(OutOfPagesError, match="MiB are left"):
        pool_sizes(config, limits, None, None, page + frame, torch.float32)


def test_sizes_that_are_given():
    limits = EngineConfig(num_pages=1, page_size=16, max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=256, seed=0)
    mixed, alone = (tiny_config(windows=windows, max_position_embeddings=2048) for windows in ((0, 64), (64, 64)))
    assert pool_sizes(mixed, limits, 40, None, None, torch.float32) == (40, 40)
    assert pool_sizes(mixed, limits, 4000, 30, None, torch.float32) == (4000, 30)
    assert pool_sizes(alone, limits, 40, None, None, torch.float32) == (1024, 40)
    assert pool_sizes(alone, limits, None, 30, None, torch.float32) == (1024, 30)
    page, frame = bytes_by_group(mixed, page_size=16, dtype=torch.float32)
    assert pool_sizes(mixed, limits, None, 30, 31 * frame + 11 * page, torch.float32) == (10, 30)
    assert bytes_of(mixed, EngineConfig(num_pages=7, page_size=16, max_model_len=9, max_num_seqs=1, max_num_batched_tokens=1, seed=0,
                                        num_frames=3), torch.float32) == 7 * page + 3 * frame  # fmt: skip


@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_what_is_retired_is_what_no_later_token_sees(window, size):
    for num_tokens in range(1, 30):
        for filled in range(num_tokens + 1):
            first = min(filled, num_tokens - 1)
            seen = {at // size for query in range(first, first + 9) for at in range(max(0, query - window + 1), query + 1)}
            assert num_retired(filled, num_tokens, window, size) == min(seen)
            now = {at // size for at in range(max(0, first - window + 1), first + 1)}
            assert len(now) <= least_frames(window, size)
