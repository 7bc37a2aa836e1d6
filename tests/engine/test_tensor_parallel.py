"""Several ranks that run one model, as threads of this process: they give what one rank gives."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.config import Mesh
from nanovllm.engine import init_state
from nanovllm.models import REGISTRY
from nanovllm.ops.distributed.in_process import ThreadGroup, run_ranks
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
GREEDY = nv.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = nv.SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = ["Once upon a time", "a fox", "The king of the birds had a bright feather, and"]


def replies(llm: nv.LLM) -> list[Any]:
    """Greedy and drawn replies, as token ids and rounded log-probabilities."""
    drawn = llm.generate(PROMPTS, DRAWN)
    logprobs = [[round(each.logprob, 6) for each in reply.logprobs or ()] for reply in drawn]
    return [[reply.token_ids for reply in llm.generate(PROMPTS, GREEDY)], [reply.token_ids for reply in drawn], logprobs]


@pytest.mark.parametrize("architecture", sorted(REGISTRY))
def test_replies_are_those_of_one_rank(architecture: str) -> None:
    config = tiny_config(architecture)

    def run(mesh: Mesh | None) -> list[Any]:
        return replies(nv.LLM(random_model(config, dtype="float64", mesh=mesh), num_pages=64, compile=False))

    alone = run(None)
    for size in (2, 4):
        assert run_ranks(run, size) == [alone] * size, size


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_eight_ranks_some_of_which_have_the_same_kv_heads(architecture: str) -> None:
    config = tiny_config(architecture, num_heads=8, num_kv_heads=2)

    def run(mesh: Mesh | None) -> list[Any]:
        return replies(nv.LLM(random_model(config, dtype="float64", mesh=mesh), num_pages=64, compile=False))

    assert run_ranks(run, 8) == [run(None)] * 8


@pytest.mark.parametrize("size", [2, 4])
def test_the_packaged_model(size: int) -> None:
    def run(mesh: Mesh | None) -> list[Any]:
        return replies(nv.LLM(nv.load_model("tiny", "cpu", "float64", mesh=mesh), num_pages=64))

    assert run_ranks(run, size) == [run(None)] * size


def story(model: nv.Model, folder: Path) -> list[Any]:
    """A program that threads a state through every way to make chunks; what it sees."""
    state, seen = nv.init_state(model, num_pages=96), list[Any]()
    state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin. He has a long beard and a loud voice.")
    state, more = nv.prefill(model, state, " The queen of Borland is Mira, who sings at night.")
    for recompute in (0, 3, 0.3):
        state, both = nv.compose(model, state, [facts, more], recompute=recompute)
        state, reply = nv.generate(model, state, [both, " Who sings?"], GREEDY)
        seen += [reply.token_ids, both.num_exact, str(both.provenance)]
        nv.save_chunk(state, both, folder / f"{recompute}.safetensors")
        state = nv.release(state, both)
    state, short = nv.drop(model, state, facts, 4, 9)
    nv.save_chunk(state, short, folder / "short.safetensors")
    state, (score,) = nv.score(model, state, [short], [" Oswin is old."])
    seen.append([round(float(value), 8) for value in score.logprobs])
    state, request_id = nv.submit(model, state, "never answered", GREEDY)
    state, _ = nv.step(model, state)
    state = nv.cancel(state, request_id)
    for name in ("0.3", "short"):
        state, back = nv.load_chunk(model, state, folder / f"{name}.safetensors")
        state, reply = nv.generate(model, state, [back, " So"], DRAWN)
        seen += [len(back), reply.token_ids]
    return [*seen, state.stats, state.pool.num_available]


def test_chunks_and_their_files(tmp_path: Path) -> None:
    config = tiny_config()

    def run(mesh: Mesh | None, folder: Path) -> list[Any]:
        folder.mkdir(exist_ok=True)
        return story(random_model(config, dtype="float64", mesh=mesh), folder)

    alone = run(None, tmp_path / "1")
    for size in (2, 4):
        folder = tmp_path / str(size)
        assert run_ranks(lambda mesh, folder=folder: run(mesh, folder), size) == [alone] * size
        for file in sorted((tmp_path / "1").iterdir()):
            one, other = (_kv(each / file.name) for each in (tmp_path / "1", folder))
            torch.testing.assert_close(other, one, rtol=0, atol=1e-12)


def _kv(file: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(file)["kv"]


def test_a_file_of_one_rank_serves_two(tmp_path: Path) -> None:
    config, path = tiny_config(), tmp_path / "facts.safetensors"

    def answer(mesh: Mesh | None, *, save: bool) -> list[int]:
        model = random_model(config, dtype="float64", mesh=mesh)
        state = nv.init_state(model, num_pages=32)
        if save:
            state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
            nv.save_chunk(state, facts, path)
        else:
            state, facts = nv.load_chunk(model, state, path)
        return nv.generate(model, state, [facts, " Who?"], GREEDY)[1].token_ids

    alone = answer(None, save=True)
    assert run_ranks(lambda mesh: answer(mesh, save=False), 2) == [alone] * 2
    run_ranks(lambda mesh: answer(mesh, save=True), 4)
    assert answer(None, save=False) == alone


TEMPERATURES = [nv.SamplingParams(temperature=t, seed=seed, max_tokens=10, ignore_eos=True) for t in (0, 0.8) for seed in (1, 2)]


@pytest.mark.parametrize("vocab_size", [64, 61])  # 61 tokens are cut into unequal parts
def test_greedy_and_random_steps_gather_no_logits(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, widths = replace(tiny_config(), vocab_size=vocab_size), list[int]()
    prompts: list[Any] = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    gather = ThreadGroup.gather_columns

    def noted(self: ThreadGroup, x: torch.Tensor, width: int) -> torch.Tensor:
        widths.append(width)
        return gather(self, x, width)

    def run(mesh: Mesh | None, options: nv.SamplingParams, **more: Any) -> list[list[int]]:
        model = random_model(config, dtype="float64", mesh=mesh)
        state = nv.init_state(model, num_pages=64, compile=False)
        return [reply.token_ids for reply in nv.generate_many(model, state, prompts, options, **more)[1]]

    monkeypatch.setattr(ThreadGroup, "gather_columns", noted)
    for options in TEMPERATURES:
        for size in (2, 4):
            assert run_ranks(lambda mesh, options=options: run(mesh, options), size) == [run(None, options)] * size
    assert not widths
    shift = nv.LogitsProcessor(lambda logits: logits.roll(1, 1))
    for options, more in ((replace(TEMPERATURES[2], top_p=0.7), {}), (TEMPERATURES[2], {"process_logits": shift})):
        expected = run(None, options, **more)
        assert run_ranks(lambda mesh, options=options, more=more: run(mesh, options, **more), 2) == [expected] * 2
        assert set(widths) == {vocab_size}
        widths.clear()


def test_submitted_requests_with_functions_and_without() -> None:
    config, shift = tiny_config(), nv.LogitsProcessor(lambda logits: logits.roll(1, 1))

    def run(mesh: Mesh | None) -> list[list[int]]:
        model = random_model(config, dtype="float64", mesh=mesh)
        state, ids = nv.init_state(model, num_pages=64, compile=False), list[int]()
        for number, prompt in enumerate(PROMPTS * 2):
            options = replace(TEMPERATURES[number % 4], max_tokens=4 + number)
            state, request_id = nv.submit(model, state, prompt, options, process_logits=shift if number == 4 else None)
            ids.append(request_id)
        replies: dict[int, list[int]] = {}
        while state.running or state.waiting:
            state, outputs = nv.step(model, state)
            replies |= {one.request_id: one.output.token_ids for one in outputs if one.output is not None}
        return [replies[each] for each in ids]

    assert run_ranks(run, 2) == [run(None)] * 2


def test_kv_in_fp8() -> None:
    config = tiny_config()

    def run(mesh: Mesh | None) -> list[list[int]]:
        llm = nv.LLM(random_model(config, dtype="float32", mesh=mesh), num_pages=64, kv_dtype="fp8", compile=False)
        return [reply.token_ids for reply in llm.generate(PROMPTS, GREEDY)]

    assert run_ranks(run, 2) == [run(None)] * 2


def test_the_pool_is_as_large_as_its_heads() -> None:
    config = tiny_config()
    pools = run_ranks(lambda mesh: nv.init_state(random_model(config, mesh=mesh), num_pages=8).kv.pools[0].shape, 2)
    assert [tuple(shape) for shape in pools] == [(2, 9, 2, 1, 16, 16)] * 2


def test_gpus_of_unlike_memory_run_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks take the lower of the defaults of their GPUs."""
    defaults = iter([8192, 4096])
    monkeypatch.setattr(init_state, "default_tokens", lambda _: next(defaults))

    def tokens(mesh: Mesh) -> int:
        return nv.init_state(random_model(tiny_config(), mesh=mesh), num_pages=8).config.max_num_batched_tokens

    assert run_ranks(tokens, 2) == [4096, 4096]


def test_a_rank_that_fails_ends_the_others() -> None:
    config = tiny_config()

    def run(mesh: Mesh) -> Any:
        llm = nv.LLM(random_model(config, mesh=mesh), num_pages=64)
        llm.generate(PROMPTS, GREEDY)
        if mesh.rank == 1:
            raise KeyError("this rank")
        with pytest.raises(nv.EngineDeadError, match="a rank has gone"):
            llm.generate(PROMPTS, GREEDY)
        with pytest.raises(nv.EngineDeadError):
            llm.generate(PROMPTS, GREEDY)

    with pytest.raises(KeyError, match="this rank"):
        run_ranks(run, 2)


@pytest.mark.parametrize(
    ("changes", "size", "told"),
    [
        ({}, 3, "3 ranks cannot share num_heads=4"),
        ({"intermediate_size": 50}, 4, "4 ranks cannot share intermediate_size=50"),
        ({"num_heads": 6, "num_kv_heads": 2}, 3, "3 ranks cannot share num_kv_heads=2"),
    ],
)
def test_what_cannot_be_shared(changes: dict[str, int], size: int, told: str) -> None:
    config = replace(tiny_config(), **changes)
    with pytest.raises(nv.InvalidRequestError, match=told):
        run_ranks(lambda mesh: random_model(config, mesh=mesh), size)


def test_decode_steps_of_a_caller() -> None:
    config = tiny_config()

    def run(mesh: Mesh | None, wrap: Callable[[Any], Any] = lambda step: step) -> list[list[int]]:
        model = random_model(config, dtype="float64", mesh=mesh)
        state = nv.init_state(model, num_pages=64, compile=False)
        state, carry = nv.begin(model, state, PROMPTS, GREEDY, room=6)
        step = wrap(nv.decode_step)
        for _ in range(6):
            carry, _ = step(model.params, carry, model.config)
        _, rows = nv.commit(model, state, carry)
        return [row.token_ids for row in rows]

    assert run_ranks(run, 2) == [run(None)] * 2


def test_gradients_are_refused() -> None:
    config = tiny_config()

    def run(mesh: Mesh) -> None:
        model = random_model(config, mesh=mesh)
        batch = nv.Batch.of_prompts([[5, 6, 7]])
        logits, _ = nv.forward(model.params, None, batch, model.config)
        assert logits.shape == (3, config.vocab_size)
        learning = replace(model.params, final_norm=model.params.final_norm.clone().requires_grad_())
        with pytest.raises(nv.InvalidRequestError, match="gradients do not pass through the sums of 2 ranks"):
            nv.forward(learning, None, batch, model.config)
        learned = torch.zeros(3, 32, requires_grad=True), torch.zeros(32, requires_grad=True)
        for given in ({"inputs_embeds": learned[0]}, {"add_hidden": {1: learned[1]}}):
            with pytest.raises(nv.InvalidRequestError, match="gradients do not pass"):
                nv.forward(model.params, None, batch, model.config, **given)
        with pytest.raises(nv.InvalidRequestError, match="gradients do not pass"):
            torch.func.grad(lambda gain: nv.forward(replace(model.params, final_norm=gain), None, batch, model.config)[0].sum())(
                model.params.final_norm
            )

    run_ranks(run, 2)


def test_a_file_that_cannot_be_written_fails_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, written = tiny_config(), [0]

    def full(*args: Any) -> int:
        written[0] += 1
        raise OSError(28, "No space left on device")

    def run(mesh: Mesh) -> list[int]:
        model = random_model(config, dtype="float64", mesh=mesh)
        state = nv.init_state(model, num_pages=32)
        state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        for name in ("lacking/a.safetensors", "b.safetensors"):
            with pytest.raises(nv.ChunkFileError):
                nv.save_chunk(state, facts, tmp_path / name)
        with pytest.raises(nv.InvalidRequestError, match="a ChunkStore is for one program"):
            nv.ChunkStore(tmp_path, max_bytes=1e6).save(state, facts)
        return nv.generate(model, state, [facts, " Who?"], GREEDY)[1].token_ids

    monkeypatch.setattr("nanovllm.chunks.storage.blocks.os.pwrite", full)
    first, second = run_ranks(run, 2)
    assert first == second and written[0]
    assert not [one for one in tmp_path.iterdir() if one.is_file() and one.suffix == ".safetensors"]


def test_weights_without_their_mesh_are_refused() -> None:
    def run(mesh: Mesh) -> None:
        model = random_model(tiny_config(), mesh=mesh)
        alone = replace(model, config=replace(model.config, mesh=None))
        with pytest.raises(nv.InvalidRequestError, match="its weights are not those of a rank"):
            nv.init_state(alone, num_pages=8)
        with pytest.raises(nv.InvalidRequestError, match="give the mesh to load_model"):
            nv.init_state(model, num_pages=8, mesh=Mesh(size=3, rank=0, group=mesh.group))
        with pytest.raises(nv.InvalidRequestError, match="ranks take the requests of tasks in different orders"):
            nv.AsyncLLM(model, num_pages=8)

    run_ranks(run, 2)


@pytest.mark.parametrize("call", ["generate", "first token", "score"])
def test_results_of_launches_that_waited_in_vain_are_not_returned(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a launch notes that another rank did not come, and goes on with wrong numbers."""

    def vain(_: ThreadGroup) -> None:
        raise nv.EngineDeadError("a launch has waited in vain")

    monkeypatch.setattr(ThreadGroup, "require_all", vain)

    def run(mesh: Mesh | None) -> None:
        model = random_model(tiny_config(), dtype="float64", mesh=mesh)
        state = nv.init_state(model, num_pages=64, compile=False)
        for _ in range(2):  # the engine stays dead
            with pytest.raises(nv.EngineDeadError, match="in vain"):
                if call == "score":
                    nv.score(model, state, [[1, 2]], [[3, 4]])
                else:
                    nv.generate(model, state, [1, 2], replace(GREEDY, max_tokens=1 if call == "first token" else 12))

    run_ranks(run, 2)
