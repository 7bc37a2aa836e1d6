"""Ranks that are processes: a program of `torchrun`, on a CPU."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nanovllm as nv
from nanovllm.ops.distributed.group import joined, summed
from nanovllm.ops.distributed.process_group import ProcessGroup, all_alike
from nanovllm.ops.sampling.draw import draw, highest

pytestmark = pytest.mark.unhooked  # the processes are not hooked anyway

PROGRAM = """
    import json, sys
    import torch
    import nanovllm as nv
    from nanovllm.ops.distributed.collectives import all_gather, all_reduce, all_reduce_add
    from nanovllm.ops.sampling.draw_parts import Parts, draw_parts

    mesh = nv.make_mesh("cpu")
    own = torch.full((2, 3), 1.0 + mesh.rank)
    logits, parts = torch.load(sys.argv[2]), Parts(mesh=mesh, vocab_size=21)
    mine = torch.nn.functional.pad(logits, (0, 1), value=99.0)[:, 11 * mesh.rank :][:, :11]
    temperature, keys = torch.tensor([0.0, 0.8, 2.0]).repeat(4), torch.arange(24).view(12, 2)
    told = {
        "reduced": all_reduce(own, mesh)[0].tolist(),
        "added": all_reduce_add(own, torch.ones(2, 3), mesh, 0)[0].tolist(),
        "gathered": all_gather(own, mesh)[:, 0, 0].tolist(),
        "highest": draw_parts(mine, None, None, parts).tolist(),
        "drawn": draw_parts(mine, temperature, keys, parts).tolist(),
    }
    model = nv.load_model("tiny", "cpu", "float64", mesh=mesh)
    state = nv.init_state(model, num_pages=64, mesh=mesh)
    state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
    nv.save_chunk(state, facts, sys.argv[1])
    state, reply = nv.generate(model, state, [facts, " Who is the king?"], nv.SamplingParams(temperature=0, max_tokens=12))
    print(json.dumps({**told, "reply": reply.token_ids, "heads": model.config.num_heads}), flush=True)
    torch.distributed.destroy_process_group()
"""


def run_ranks(program: str, size: int, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a program as `torchrun` starts it, without its supervision."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port may be taken until the ranks run
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    ended = [process.communicate(timeout=600) for process in started]
    return [subprocess.CompletedProcess([], p.returncode, *told) for p, told in zip(started, ended, strict=True)]


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [([[1, 9, 0]] * 3, True), ([[1, 9, 0], [0, 9, 0]], False), ([[0, 9, 0]] * 2, False), ([[1, 9, 0], [1, 8, 6]], False)],
)
def test_ranks_share_memory_if_all_reach_it_and_have_gpus_of_one_kind(ranks: list[list[int]], shares: bool) -> None:
    assert all_alike([torch.tensor(rank) for rank in ranks]) == shares


def test_a_program_of_two_processes(tmp_path: Path) -> None:
    file, logits = tmp_path / "facts.safetensors", torch.randn(12, 21, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    torch.save(logits, tmp_path / "logits.pt")
    ranks = run_ranks(PROGRAM, 2, str(file), str(tmp_path / "logits.pt"))
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    first, second = (json.loads(rank.stdout.splitlines()[-1]) for rank in ranks)
    assert first == second
    assert (first["reduced"], first["added"], first["gathered"]) == ([3.0] * 3, [4.0] * 3, [1.0, 2.0])
    assert first["highest"] == highest(logits).tolist()
    keys, temperature = torch.arange(24).view(12, 2), torch.tensor([0.0, 0.8, 2.0]).repeat(4)
    assert first["drawn"] == draw(logits, temperature, None, keys).tolist()
    model = nv.load_model("tiny", "cpu", "float64")
    assert first["heads"] == model.config.num_heads // 2
    state = nv.init_state(model, num_pages=64)
    state, facts = nv.load_chunk(model, state, file)
    _, reply = nv.generate(model, state, [facts, " Who is the king?"], nv.SamplingParams(temperature=0, max_tokens=12))
    assert reply.token_ids == first["reply"]


@pytest.mark.parametrize("size", [4, 8])
def test_programs_of_four_and_eight_processes(tmp_path: Path, size: int) -> None:
    """The ranks of a KV head hold copies of it. Replies are those of one rank, which takes up the chunk that the others have saved."""
    program = """
        import json, sys
        from pathlib import Path
        import torch
        import nanovllm as nv
        from nanovllm.ops.distributed.collectives import all_gather, all_reduce
        from nanovllm.testing.models import random_model, tiny_config

        mesh, told = nv.make_mesh("cpu"), {}
        greedy = nv.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        drawn = nv.SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
        for architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
            model = random_model(tiny_config(architecture, num_heads=8, num_kv_heads=2), dtype="float64", mesh=mesh)
            state, file = nv.init_state(model, num_pages=64, mesh=mesh), Path(sys.argv[1]) / architecture
            if mesh.size > 1:
                state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
                nv.save_chunk(state, facts, file)
            else:
                state, facts = nv.load_chunk(model, state, file)
            state, one = nv.generate(model, state, [facts, " Who is the king?"], greedy)
            state, other = nv.generate(model, state, "A fox", drawn)
            told[architecture] = [one.token_ids, other.token_ids]
        own = torch.tensor([float(mesh.rank)])
        sums = all_reduce(own, mesh).tolist(), all_gather(own, mesh).flatten().tolist()
        print(json.dumps([told, model.config.num_heads, *sums]), flush=True)
        torch.distributed.destroy_process_group()
    """
    ranks, (alone,) = run_ranks(program, size, str(tmp_path)), run_ranks(program, 1, str(tmp_path))
    assert not any(rank.returncode for rank in (*ranks, alone)), [rank.stderr[-1000:] for rank in (*ranks, alone)]
    told, *_ = json.loads(alone.stdout.splitlines()[-1])
    for rank in ranks:
        assert json.loads(rank.stdout.splitlines()[-1]) == [told, 8 // size, [sum(range(size))], [*range(size)]]


def test_a_prompt_in_two_halves() -> None:
    """The sums are begun by two processes. The logits are those of the prompt that runs whole, with the same bits on both ranks.

    Those are the logits of the model's own `forward`, also with experts, whose sum and the next norm are one operation.
    """
    program = """
        import hashlib
        import torch
        import nanovllm as nv
        from nanovllm.models.fast import fused, halves
        from nanovllm.testing.driver import layout, step_batch
        from nanovllm.testing.models import random_model, tiny_config

        fused.follows_closely = lambda *_: False
        mesh, cpu = nv.make_mesh("cpu"), torch.device("cpu")
        experts = random_model(tiny_config("Qwen3MoeForCausalLM"), dtype="float64", mesh=mesh)
        digests = []
        for model in (nv.load_model("tiny", "cpu", "float64", mesh=mesh), experts):
            ids = [7 * at % 260 for at in range(90)]
            plain, one, other = (layout(model, [90, 20], 16) for _ in range(3))
            pieces = [(0, ids, 0), (1, ids[:20], 0)]
            expected, _ = model.spec.forward(model.params, plain.kv, step_batch(plain, pieces, cpu), model.config)
            whole, _ = fused.forward(model.params, one.kv, step_batch(one, pieces, cpu), model.config)
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-8)
            parts = [step_batch(other, some, cpu) for some in ([(0, ids[:50], 0)], [(0, ids[50:], 50), (1, ids[:20], 0)])]
            logits, _ = halves.forward(model.params, other.kv, parts, model.config)
            torch.testing.assert_close(logits, whole, rtol=0, atol=1e-10)
            digests.append(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
        print(digests, flush=True)
        torch.distributed.destroy_process_group()
    """
    ranks = run_ranks(program, 2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert ranks[0].stdout.splitlines()[-1] == ranks[1].stdout.splitlines()[-1]


def test_a_rank_that_ends_ends_the_other() -> None:
    program = """
        import os, signal
        import nanovllm as nv

        mesh = nv.make_mesh("cpu")
        llm = nv.LLM(nv.load_model("tiny", "cpu", mesh=mesh), num_pages=64)
        llm.generate("Hello", nv.SamplingParams(max_tokens=4))
        if mesh.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            llm.generate("Hello", nv.SamplingParams(max_tokens=400, ignore_eos=True))
        except nv.EngineDeadError as error:
            print("dead:", error, flush=True)
            os._exit(7)
    """
    first, second = run_ranks(program, 2)
    assert (first.returncode, second.returncode) == (7, -9), first.stderr
    assert "rank 0 of 2 cannot reach the others" in first.stdout


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(nv.InvalidRequestError, match="RANK and WORLD_SIZE not set: start the program by torchrun"):
        nv.make_mesh("cpu")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(nv.InvalidRequestError, match="there is no cuda:3"):
        nv.make_mesh("cuda:3")


def test_a_group_needs_a_backend_for_tensors_of_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have initialised a group for GPUs alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        with pytest.raises(nv.InvalidRequestError, match=r"no backend for cpu tensors: initialise it with 'gloo'"):
            nv.make_mesh("cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    parts = [torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(4)]
    exact = torch.stack([part.double() for part in parts]).sum(0)
    torch.testing.assert_close(summed(parts).double(), exact.to(dtype).double(), rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6)
    stacked, bias = torch.stack(parts), torch.ones(8, dtype=dtype)
    torch.testing.assert_close(joined(stacked, bias, dtype).double(), (exact + 1).to(dtype).double(), rtol=1e-6, atol=1e-6)
    assert joined(stacked[:1], None, dtype) is not None and torch.equal(joined(stacked[:1], None, dtype), stacked[0])


def test_a_rank_that_runs_out_of_memory_in_a_pass_ends_the_engine_on_all() -> None:
    """It releases the other, which waits in a sum. A rank that knows of the shortage before the pass ends nothing."""
    program = """
        import torch
        import nanovllm as nv
        from nanovllm.executor import agreed_memory
        from nanovllm.models.common import layers

        def short(*given):
            raise torch.OutOfMemoryError("no memory")

        mesh = nv.make_mesh("cpu")
        llm = nv.LLM(nv.load_model("tiny", "cpu", mesh=mesh), num_pages=64)
        take = agreed_memory.take_memory
        if mesh.rank:
            agreed_memory.take_memory = short
        reply = llm.generate([[300, 301]], nv.SamplingParams(max_tokens=4))[0]
        assert isinstance(reply.error, nv.OutOfPagesError)
        agreed_memory.take_memory = take
        print(llm.generate("Hello", nv.SamplingParams(max_tokens=4))[0].finish_reason, llm.state.stats.memory_shortages)

        class Breaks:
            def __init__(self, inner):
                self.inner = inner

            def __getattr__(self, name):
                return short if name == "all_reduce_add_norm" or name == "all_reduce" else getattr(self.inner, name)

        if mesh.rank:
            from nanovllm.ops.distributed import collectives
            lookup = collectives.lookup
            collectives.lookup = lambda handle, kind: Breaks(lookup(handle, kind))
        try:
            llm.generate("Hello", nv.SamplingParams(max_tokens=4))
        except nv.EngineDeadError as error:
            print("dead:", error, flush=True)
    """
    first, second = run_ranks(program, 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.startswith("length 2\ndead: ") and second.stdout.startswith("length 2\ndead: ")
    assert "rank 1 of 2 ran out of device memory in a call" in second.stdout


class Held:
    """A group as NCCL's: its end waits for graphs that are freed later."""

    def __init__(self) -> None:
        self.calls, self.freed = 0, threading.Event()

    def abort(self) -> None:
        self.calls += 1
        assert self.freed.wait(60)


def test_giving_up_waits_for_no_graphs() -> None:
    """The caller may own them. Whoever frees them waits afterwards."""
    group: Any = ProcessGroup.__new__(ProcessGroup)
    group.device, group._group, group._shared = torch.device("cuda:0"), Held(), None
    group._ending, group._once = None, threading.Lock()
    assert group.given_up(0.0)
    began = time.monotonic()
    for _ in range(2):
        group.give_up()
    assert not group.given_up(0.1)
    assert time.monotonic() - began < 30
    group._group.freed.set()
    assert group.given_up(60) and group._group.calls == 1
