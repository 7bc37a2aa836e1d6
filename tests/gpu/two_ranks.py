"""A program for two or more processes with a GPU each: sums over the ranks, tokens from parts of the logits, and a model that all run.

`test_ranks_gpu.py` starts it.

torchrun --nproc-per-node 2 tests/gpu/two_ranks.py
torchrun --nproc-per-node 4 tests/gpu/two_ranks.py
torchrun --nproc-per-node 8 tests/gpu/two_ranks.py
"""

import gc
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import nanovllm as nv
from nanovllm.config import Mesh, ModelConfig
from nanovllm.engine.requests import submit_many
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_model
from nanovllm.executor.executor import executor_of
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.executor.prompt_halves import least_tokens
from nanovllm.loading.quantisation.rounding import require_rounding, rounded_params
from nanovllm.models.common.params import Params
from nanovllm.models.common.sharding import by_field, sharded_params
from nanovllm.ops.distributed.collectives import all_gather, all_gather_columns, all_reduce, all_reduce_add, all_reduce_add_norm
from nanovllm.ops.distributed.group import summed
from nanovllm.ops.distributed.process_group import ALIGNED, ProcessGroup, make_mesh
from nanovllm.ops.distributed.shared_memory import ADDED
from nanovllm.ops.elementwise.norm_rope import rms_norm
from nanovllm.ops.linear.quantise import Kind, quantise
from nanovllm.ops.moe.quantised_experts import any_experts
from nanovllm.ops.sampling.draw import draw, highest
from nanovllm.ops.sampling.draw_parts import Parts, draw_parts

SIZES = (8, 1024, 4096, 5120, 64 * 4096, 65 * 4096, 300 * 4096, 1100 * 4096)
HALVES = (
    (None, None, "qwen3-8b"),
    (None, "fp8", "qwen3-8b"),
    ("fp8", None, "qwen3-8b"),
    ("int4", None, "qwen3-8b"),
    (None, None, "qwen3-30b-a3b"),
)
BEGAN = time.perf_counter()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_sums(mesh: Mesh, device: torch.device) -> None:
    """Each form of a sum against its definition, called alone and replayed from a graph."""
    bound = 2e-2 * mesh.size  # of a sum that is rounded before the residual is added
    for dtype in DTYPES:
        for count in SIZES:
            y, x = (torch.randn(1, count, device=device).to(dtype) for _ in range(2))
            dist.broadcast(x, 0)
            parts = list(all_gather(y, mesh).unbind())
            torch.testing.assert_close(all_reduce(y, mesh), summed(parts), rtol=2e-2, atol=bound)
            expected, exact = summed(parts, x), x.nbytes <= ADDED and x.nbytes % (ALIGNED * mesh.size) == 0
            for slot in (0, 1, 0):
                found = all_reduce_add(y, x, mesh, slot)
                assert torch.equal(found, expected) if exact else torch.allclose(found, expected, 2e-2, bound), (dtype, count)
            everyone = all_gather(all_reduce(y, mesh), mesh)
            assert all(torch.equal(everyone[0], other) for other in everyone), "all ranks have the same bits"
        for rows, width in ((1, 4096), (8, 4096), (33, 5120), (256, 4096), (16, 100), (300, 8192)):
            y, x = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
            gain = torch.rand(width, device=device).to(dtype) + 0.5
            for tensor in (x, gain):
                dist.broadcast(tensor, 0)
            expected = summed(list(all_gather(y, mesh).unbind()), x)
            halves, bias = torch.stack([y.float() * 0.25, y.float() * 0.75]), torch.zeros_like(gain)
            added, _ = all_reduce_add_norm(halves, bias, x, gain, 1e-6, mesh, 1)
            torch.testing.assert_close(added, expected, rtol=2e-2, atol=bound)
            for slot in (0, 1):
                added, normed = all_reduce_add_norm(y.unsqueeze(0), None, x, gain, 1e-6, mesh, slot)
                torch.testing.assert_close(added, expected, rtol=2e-2, atol=bound)
                torch.testing.assert_close(normed, rms_norm(added, gain, 1e-6), rtol=2e-2, atol=2e-2)
        for rows, columns, most in ((1, 75968, 151936), (70, 75968, 151936), (300, 75968, 151936), (5, 132, 263), (40000, 66, 131)):
            y = torch.randn(rows, columns, device=device).to(dtype)
            for _ in range(2):
                found = all_gather_columns(y, mesh, most)
                assert torch.equal(found, torch.cat(list(all_gather(y, mesh).unbind()), 1)[:, :most]), (dtype, rows, columns)
    y, x = (torch.randn(8, 4096, device=device).to(torch.bfloat16) for _ in range(2))
    dist.broadcast(x, 0)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        first = all_reduce_add(y, x, mesh, 0)
        second = all_reduce_add(y * 2, first, mesh, 1)
    for _ in range(200):
        y.copy_(torch.randn_like(y))
        parts = list(all_gather(y, mesh).unbind())
        graph.replay()
        expected = summed(parts, x)
        assert torch.equal(first, expected) and torch.equal(second, summed([2 * part for part in parts], expected))


def check_bounds(mesh: Mesh, device: torch.device, pushed: int) -> None:
    """Sums of infinities and of NaN, that with all bits set too, on both sides of each bound, in an odd number of calls of each form."""
    for dtype in DTYPES:
        rows = pushed // (4096 * dtype.itemsize)
        for count in (1, 3, rows, rows + 1, 16 * rows + 1):
            everyone = torch.randn(mesh.size, count, 4096, generator=_same(device, count), device=device).to(dtype)
            x = torch.randn(count, 4096, generator=_same(device, 7), device=device).to(dtype)
            gain = torch.ones(4096, device=device, dtype=dtype)
            for at, value in enumerate((float("inf"), -float("inf"), float("nan"), 0.0)):
                everyone[at % mesh.size, :, 5 * at] = value
            everyone.view(torch.int32 if dtype == torch.float32 else torch.int16)[-1, :, 30:40] = -1  # all bits set
            y, expected = everyone[mesh.rank].contiguous(), summed(list(everyone), x)
            found = [all_reduce(y, mesh), all_reduce_add(y, x, mesh, 0), *all_reduce_add_norm(y.unsqueeze(0), None, x, gain, 1e-6, mesh, 1)]
            for one, right in zip(found, (summed(list(everyone)), expected, expected), strict=False):
                torch.testing.assert_close(one, right, rtol=2e-2, atol=2e-2 * mesh.size, equal_nan=True)
            assert found[3].isnan().all()
            bits = all_gather(torch.stack(found).view(torch.uint8), mesh)
            assert all(torch.equal(bits[0], other) for other in bits), "all ranks have the same bits"


def check_replays(mesh: Mesh, device: torch.device, pushed: int) -> None:
    """Graphs with an odd number of sums of each form, replayed one after another, while another rank is late each time.

    Nothing but the sums makes the ranks wait for each other: each knows what all give.
    """
    few, many, gain = 8, pushed // 8192 + 8, torch.ones(4096, device=device, dtype=torch.bfloat16)
    everyone, x = (torch.zeros(*shape, many, 4096, device=device, dtype=torch.bfloat16) for shape in ((mesh.size,), ()))
    own, graphs = torch.zeros_like(x), []

    def sums(plain: int) -> list[torch.Tensor]:
        found = [all_reduce(own[:few], mesh) for _ in range(plain)]
        found += [all_reduce_add(own[:few], x[:few], mesh, 0), all_reduce_add(own[:1], x[:1], mesh, 1)]
        found += all_reduce_add_norm(own[:few].unsqueeze(0), None, x[:few], gain, 1e-6, mesh, 0)
        return [*found, all_reduce_add(own, x, mesh, 1), *all_reduce_add_norm(own.unsqueeze(0), None, x, gain, 1e-6, mesh, 0)]

    for plain in (3, 1):
        sums(plain)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = sums(plain)
        graphs.append((graph, plain, found))
    same, wrong = _same(device, 3), torch.zeros((), device=device, dtype=torch.int64)
    for turn in range(300):
        everyone.copy_(torch.randn(everyone.shape, generator=same, device=device))
        x.copy_(torch.randn(x.shape, generator=same, device=device))
        own.copy_(everyone[mesh.rank])
        if turn // 3 % mesh.size == mesh.rank:
            torch.cuda._sleep(50000 if turn % 3 else 1000000)
        graph, plain, found = graphs[turn % 5 % 2]
        graph.replay()
        added, norm = summed(list(everyone), x), rms_norm(summed(list(everyone), x), gain, 1e-6)
        few_summed = summed(list(everyone[:, :few]))
        expected = [few_summed] * plain + [added[:few], added[:1], added[:few], norm[:few], added, added, norm]
        for one, right in zip(found, expected, strict=True):
            wrong += (~((one - right).abs() <= (0.05 if right.data_ptr() == norm.data_ptr() else 0))).sum()
    assert not wrong.item(), f"{wrong.item()} elements differ"


def _same(device: torch.device, seed: int) -> torch.Generator:
    """A generator that gives all ranks the same numbers."""
    return torch.Generator(device).manual_seed(seed)


def check_winners(mesh: Mesh, device: torch.device) -> None:
    """Tokens from the ranks' parts of the logits against those from all logits: called alone, replayed from a graph, and through NCCL."""
    for vocab, rows in ((151936, 1), (151936, 64), (128257, 300), (32003, 9000), (4099, 5), (1, 2)):
        parts, width = Parts(mesh=mesh, vocab_size=vocab), -(-vocab // mesh.size)
        temperature = torch.tensor([0.0, 0.7, 1.0], device=device).repeat(rows)[:rows]
        for dtype in DTYPES:
            own = torch.randn(rows, width, device=device).to(dtype)
            own[rows // 2] = -torch.inf
            own[:, : width // 3] = own[:, : width // 3].round()  # ties
            keys = torch.arange(2 * rows, device=device).view(rows, 2)
            whole = parts.whole(own)
            for _ in range(3):
                assert torch.equal(draw_parts(own, None, None, parts), highest(whole)), (vocab, rows, dtype)
                assert torch.equal(draw_parts(own, temperature, keys, parts), draw(whole, temperature, None, keys)), (vocab, rows, dtype)
            exact = own.double()  # which our kernels do not read
            assert torch.equal(draw_parts(exact, None, None, parts), highest(parts.whole(exact)))
    vocab, rows = 151936, 8
    parts, temperature = Parts(mesh=mesh, vocab_size=vocab), torch.full((rows,), 0.8, device=device)
    own, keys = torch.randn(rows, vocab // mesh.size, device=device), torch.arange(2 * rows, device=device).view(rows, 2)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        best = draw_parts(own, None, None, parts)
        drawn = draw_parts(own, temperature, keys, parts)
    for _ in range(300):
        own.copy_(torch.randn_like(own))
        keys.add_(1)
        graph.replay()
        if not mesh.rank:
            torch.cuda._sleep(10000)  # this rank comes late to the next step
        whole = parts.whole(own)
        assert torch.equal(best, highest(whole)) and torch.equal(drawn, draw(whole, temperature, None, keys))


def check_model(mesh: Mesh, device: torch.device, kind: str | None, compile: bool | None, shape: str = "qwen3-0.6b") -> dict[str, Any]:
    """Log-probabilities and replies of all ranks beside those of one."""
    config = replace(SHAPES[shape], num_layers=4 if SHAPES[shape].moe is None else 2, max_position_embeddings=4096)

    def run(mesh: Mesh | None) -> tuple[Any, ...]:
        model = random_model("ranks", config, device=device, dtype="bfloat16", mesh=mesh)
        if (rounding := require_rounding(kind, False)) is not None:
            model = replace(model, params=rounded_params(model.params, rounding))
        return answers(model, compile)

    return compared(run(None), run(mesh), config, device)


def check_groups(mesh: Mesh, device: torch.device, kind: Kind) -> dict[str, Any]:
    """Compare experts of which each rank has 192 columns with the whole experts, and then the replies, as `check_model` does.

    Eight ranks have so many columns of Qwen3-235B-A22B-FP8. They are one and a half groups with one scale, and groups differ in magnitude.
    """
    shape = SHAPES["qwen3-30b-a3b"]
    assert shape.moe is not None
    moe = replace(shape.moe, intermediate_size=192 * mesh.size)
    config = replace(shape, num_layers=2, max_position_embeddings=4096, moe=moe)

    def rounded(field: str, value: Any) -> Any:
        if field not in ("qkv", "o", "gate_up", "down"):
            return value
        magnitudes = 2.0 ** (torch.arange(value.shape[-1], device=device) // 128 % 4 - 2)
        return quantise(value * magnitudes.to(value.dtype) if field == "down" else value, kind, 128)

    whole = random_model("groups", config, device=device, dtype="bfloat16")
    params: Params[Any] = by_field(rounded, whole.params)
    part = random_model("groups", config, device=device, dtype="bfloat16", mesh=mesh)
    models = (replace(whole, params=params), replace(part, params=sharded_params(params, config, mesh)))
    all_, own = (model.params.layers[0].experts for model in models)
    assert all_ is not None and own is not None and own.down.shape[2] == 192
    for tokens in (1, 8, 300):
        same = _same(device, tokens)
        x = torch.randn(tokens, config.hidden_size, generator=same, device=device).to(torch.bfloat16)
        weights, chosen = torch.rand(tokens, moe.num_experts, generator=same, device=device).topk(moe.top_k)
        expected = any_experts(x, all_.gate_up, all_.down, chosen.int(), weights, "silu").float()
        found = all_reduce(any_experts(x, own.gate_up, own.down, chosen.int(), weights, "silu"), mesh).float()
        error = float(((found - expected).abs().amax(1) / expected.abs().amax(1)).max())
        assert error < 0.02, f"experts of {tokens} tokens differ by {error}"
    alone, every = (answers(model, None) for model in models)
    return compared(alone, every, config, device)


def answers(model: nv.Model, compile: bool | None) -> tuple[list[Any], torch.Tensor]:
    """Replies to groups of prompts, greedy and drawn, and log-probabilities of given tokens."""
    prompts: list[Any] = [[(11 * row + 7 * at) % 9000 + 300 for at in range(4 + 37 * row)] for row in range(24)]
    greedy = nv.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    random = replace(greedy, temperature=0.8, seed=3)
    filtered = replace(random, top_p=0.9)
    long: list[Any] = [[(3 * at) % 9000 + 300 for at in range(1500)]]
    llm = nv.LLM(model, num_pages=2048, max_num_seqs=64, check=False, compile=compile)
    scores = llm.score(long, [[5, 6, 7, 8]]) + llm.score(prompts[:3], [[5, 6]] * 3)
    groups = [(some, greedy) for some in (prompts[:1], prompts[:6], prompts, long)] + [(prompts[:6], random), (prompts[:6], filtered)]
    replies = [[reply.token_ids for reply in llm.generate(some, options)] for some, options in groups]
    return replies, torch.cat([torch.as_tensor(score.logprobs) for score in scores])


def compared(alone: tuple[Any, ...], every: tuple[Any, ...], config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Compare what `answers` gave with one rank and with all. Rounding may route a token to other experts."""
    ours, other = (torch.tensor([token for group in every[0] for reply in group for token in reply], device=device) for _ in range(2))
    dist.broadcast(other, 0)
    assert torch.equal(ours, other), "the ranks' replies differ"
    same = sum(
        a == b
        for one, two in zip(alone[0], every[0], strict=True)
        for r, s in zip(one, two, strict=True)
        for a, b in zip(r, s, strict=True)
    )
    error = float((alone[1] - every[1]).abs().max())
    assert error < (0.1 if config.moe is None else 0.5), f"log-probabilities differ by {error}"
    return {"tokens_alike": same, "of": 24 * (1 + 6 + 24 + 1 + 6 + 6), "logprob_error": round(error, 4)}


def check_halves(mesh: Mesh, device: torch.device, kind: str | None, kv_dtype: str | None, shape: str) -> dict[str, Any]:
    """Log-probabilities of prompts that run as two halves beside those of prompts that run whole, and the same bits twice and on all ranks.

    The prompts are one, another, several of which one is cut, and one that goes on from pages that are there.
    """
    config = replace(SHAPES[shape], num_layers=4 if SHAPES[shape].moe is None else 2, max_position_embeddings=16384)
    model = random_model("halves", config, device=device, dtype="bfloat16", mesh=mesh)
    if (rounding := require_rounding(kind, False)) is not None:
        model = replace(model, params=rounded_params(model.params, rounding))
    lengths, known = ((9000,), (12001,), (1500, 3100, 2900, 40), (15000,)), torch.arange(16384) * 7
    state, ran = nv.init_state(model, num_pages=8192, max_num_seqs=16, check=False, kv_dtype=kv_dtype), [0]
    executor = executor_of(state)
    assert isinstance(executor, GraphExecutor) and executor.halves_from == least_tokens(model) is not None
    inner = executor._in_halves

    def counted(*args: Any) -> Any:
        ran[0] += 1
        return inner(*args)

    executor._short = None  # graphs of prompts run whole
    executor._in_halves = counted  # pyright: ignore[reportAttributeAccessIssue]

    def run(least: int | None, namespace: int) -> tuple[torch.Tensor, list[Any], int]:
        nonlocal state
        executor.halves_from, ran[0], found, replies = least, 0, list[torch.Tensor](), dict[int, list[int]]()
        greedy = nv.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        for each in lengths:
            prompts: list[Any] = [((known[:length] + 11 * row) % 9000 + 300).tolist() for row, length in enumerate(each)]
            state, _ = submit_many(model, state, [[17, *prompt] for prompt in prompts], [greedy] * len(prompts), namespace=namespace)
            while state.running or state.waiting:
                state, outputs = nv.step(model, state)
                replies |= {one.request_id: one.output.token_ids for one in outputs if one.output is not None}
            state, scores = nv.score(model, state, prompts, [[5, 6, 7, 8]] * len(prompts), namespace=namespace)
            found += [torch.as_tensor(score.logprobs) for score in scores]
        return torch.cat(found), [replies[each] for each in sorted(replies)], ran[0]

    (whole, _, none), (cut, replies, some), (again, same, _) = (run(*how) for how in ((None, 1), (2048, 2), (2048, 3)))
    assert not none and some >= 4, (none, some)
    assert torch.equal(cut, again) and replies == same, "two runs differ"
    everyone = all_gather(cut.to(device), mesh)
    assert all(torch.equal(everyone[0], other) for other in everyone), "the ranks' log-probabilities differ"
    error = float((cut - whole).abs().max())
    assert error < (0.1 if config.moe is None else 0.5), f"log-probabilities differ by {error}"
    return {"passes": some, "logprob_error": round(error, 4)}


def say(mesh: Mesh, *words: object) -> None:
    """Print words on rank 0, with the seconds since the program began."""
    if not mesh.rank:
        print(f"{time.perf_counter() - BEGAN:.0f} s:", *words, flush=True)


def main() -> None:
    """Run all checks. With `--halves` or `--groups`, run only those."""
    mesh = make_mesh()
    assert isinstance(mesh.owner, ProcessGroup)
    device = mesh.owner.device
    alone = {"--halves", "--groups"}.intersection(sys.argv[1:])
    if not alone:
        check_all_others(mesh, device)
    for kind in ("fp8", "int4") if not alone or "--groups" in alone else ():
        told = check_groups(mesh, device, kind)
        say(mesh, "groups", kind, told)
    for kind, kv_dtype, shape in HALVES if not alone or "--halves" in alone else ():
        told = check_halves(mesh, device, kind, kv_dtype, shape)
        say(mesh, "halves", kind, kv_dtype, shape, told)
    torch.cuda.synchronize()
    gc.collect()  # NCCL waits for the end of graphs that use it
    mesh.owner.require_all()
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)


def check_all_others(mesh: Mesh, device: torch.device) -> None:
    """Run all checks but those that can run alone."""
    assert isinstance(mesh.owner, ProcessGroup)
    check_sums(mesh, device)
    check_bounds(mesh, device, mesh.owner.pushed)
    check_replays(mesh, device, mesh.owner.pushed)
    mesh.owner.require_all()
    say(mesh, "sums agree")
    check_winners(mesh, device)
    say(mesh, "winners agree")
    for kind in (None, "fp8", "int4"):
        for compile in (None, False) if kind is None else (None,):
            told = check_model(mesh, device, kind, compile)
            say(mesh, kind, compile, told)
    for kind in (None, "fp8"):
        told = check_model(mesh, device, kind, None, "qwen3-30b-a3b")
        say(mesh, "experts", kind, told)


if __name__ == "__main__":
    main()
