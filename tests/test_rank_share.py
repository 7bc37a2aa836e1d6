"""`benchmarks/rank_share.py`: a rank without the others runs its share of a model, and its launches wait for nobody."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_leaves

import nanovllm as nv
from benchmarks import gpus, rank_share
from benchmarks.absent_ranks import AbsentRanks, mesh_of_one, own_memory
from nanovllm.config import Mesh
from nanovllm.entrypoints.cli.bench import model_shapes
from nanovllm.entrypoints.cli.bench.model_shapes import random_weights
from nanovllm.ops.distributed.shared_memory import GATHERED, WORDS, slot_of
from nanovllm.testing.models import random_model, tiny_config

CPU = torch.device("cpu")


def weights(model: nv.Model) -> int:
    """The number of weights of all layers."""
    return sum(leaf.numel() for leaf in tree_leaves(model.params.layers) if leaf is not None)


@pytest.mark.unhooked  # a whole engine
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_rank_alone_generates(architecture: str) -> None:
    mesh, config = mesh_of_one(2, CPU), tiny_config(architecture)
    model = random_model(config, mesh=mesh)
    assert model.config.num_heads == config.num_heads // 2
    assert weights(model) < 0.6 * weights(random_model(config))
    with nv.LLM(model, num_pages=16) as llm:
        greedy, drawn = (llm.generate(["a fox"], nv.SamplingParams(temperature=t, max_tokens=5, ignore_eos=True)) for t in (0, 0.8))
    assert len(greedy[0].token_ids) == len(drawn[0].token_ids) == 5


def test_sums_have_one_part_and_columns_are_those_of_this_rank() -> None:
    group = AbsentRanks(3, CPU)
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    assert torch.equal(group.all_reduce(x), x) and torch.equal(group.begin_all_reduce(x.clone())(), x)
    assert torch.equal(group.all_reduce_add(y, x, 0), x + y)
    added, normed = group.all_reduce_add_norm(y[None], None, x, torch.ones(8), 0.0, 0)
    assert torch.equal(added, x + y) and torch.allclose(normed.square().mean(1), torch.ones(2))
    assert group.all_gather(x).shape == (3, 2, 8) and torch.equal(group.gather_columns(x, 20), torch.cat([x, x, x], 1)[:, :20])
    assert group.winners(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([[4, 7, 9]], dtype=torch.int32)).tolist() == [7]
    assert group.given_up(0.0)


@pytest.mark.interpret
def test_launches_over_memory_of_one_rank_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.language as tl

    from nanovllm.ops.distributed import triton_meetings, triton_pushes, triton_winners

    for module in (triton_meetings, triton_pushes, triton_winners):
        monkeypatch.setattr(module, "SPINS", tl.constexpr(3000))  # a launch that waits fails
    shared, x, y = own_memory(CPU), torch.randn(2, 256), torch.randn(2, 256)
    for _ in range(3):  # the two places in turn
        assert torch.equal(triton_pushes.pushed(y, x, shared, False), x + y)
        added, _ = triton_pushes.pushed_norm(y[None], None, x, x[0], 1e-6, shared, False)
        assert torch.equal(added, x + y)
    assert torch.equal(triton_meetings.reduce(y, None, shared, 0, GATHERED, False), y)
    assert torch.equal(triton_meetings.reduce_in_shares(y, shared, 0, GATHERED, False), y)
    assert torch.equal(triton_meetings.reduce_norm(y[None], None, x, x[0], 1e-6, shared, *slot_of(1), False)[0], x + y)
    ids = torch.tensor([[4, 7, 9]], dtype=torch.int32)
    assert triton_winners.winners(torch.tensor([[1.0, 3.0, 3.0]]), ids, shared, WORDS).tolist() == [7]
    assert not shared.failed.item()


def test_the_first_layers_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("Qwen3MoeForCausalLM", num_layers=3)
    monkeypatch.setattr(model_shapes, "SHAPES", {"small": config})
    model = random_weights("small", device=CPU, layers=2)
    assert model.config.num_layers == len(model.params.layers) == 2
    assert model.config.moe is not None and model.config.moe.layers == (1,)
    assert random_weights("small", device=CPU).config.num_layers == 3
    for count in (0, 4):
        with pytest.raises(nv.InvalidRequestError, match="1 to 3"):
            random_weights("small", device=CPU, layers=count)


def test_the_command_measures_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[object]()

    def measure(arguments: list[str], make: Callable[[], Mesh], *more: object) -> None:
        seen.extend((arguments, make(), *more))

    monkeypatch.setattr(rank_share, "mesh_of_one", lambda size, device: (size, device.type))
    monkeypatch.setattr(gpus, "main", measure)
    rank_share.main(["--ranks", "8", "--model", "qwen3-8b", "--layers", "12"])
    assert seen == [["--model", "qwen3-8b"], (8, "cuda"), "python -m benchmarks.rank_share --ranks 8 --layers 12", 12]
    with pytest.raises(SystemExit):
        rank_share.main(["--ranks", "1"])
