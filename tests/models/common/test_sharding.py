"""Weights cut for ranks: in memory, from files, and quantised."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.config import Mesh
from nanovllm.loading.safetensors_headers import TensorHeader
from nanovllm.loading.weights import _read_into, load_params
from nanovllm.models import REGISTRY
from nanovllm.models.common.params import Ranges
from nanovllm.models.common.sharding import cut, part_of, sharded_config, sharded_params
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.ops.linear.quantise import KINDS, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix, gpu_layout
from nanovllm.ops.linear.quantised_ranges import column_range, row_ranges
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

CPU = torch.device("cpu")


def mesh_of(size: int, rank: int) -> Mesh:
    """A mesh that is only asked for its numbers."""
    return Mesh(size=size, rank=rank, group=0)


def leaves(params: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(params) if leaf is not None]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", sorted(REGISTRY))
def test_a_rank_reads_its_part(tmp_path: Path, architecture: str, size: int) -> None:
    config = tiny_config(architecture, vocab_size=263)  # no multiple of the ranks
    save_hf_folder(tmp_path, config)
    how: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "progress": False}
    whole, mark, _ = load_params(tmp_path, config, **how)
    for rank in range(size):
        mesh = mesh_of(size, rank)
        own, same, _ = load_params(tmp_path, config, **how, mesh=mesh)
        assert same == mark, "the fingerprint is that of the checkpoint"
        for mine, expected in zip(leaves(own), leaves(sharded_params(whole, config, mesh)), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_the_parts_are_the_whole() -> None:
    config = tiny_config()
    whole = random_model(config).params
    parts = [sharded_params(whole, config, mesh_of(2, rank)) for rank in range(2)]
    first, (one, other) = whole.layers[0], (part.layers[0] for part in parts)
    assert torch.equal(torch.cat([one.o, other.o], 1), first.o)
    assert first.down is not None and one.down is not None and other.down is not None
    assert torch.equal(torch.cat([one.down, other.down], 1), first.down)
    assert torch.equal(torch.cat([parts[0].embed, parts[1].embed]), whole.embed)
    assert torch.equal(torch.cat([one.qkv[:32], other.qkv[:32], one.qkv[32:48], other.qkv[32:48], one.qkv[48:], other.qkv[48:]]), first.qkv)


def test_ranks_copy_a_kv_head() -> None:
    config = tiny_config()
    parts = [part_of("qkv", (128, 32), config, mesh_of(4, rank)).ranges for rank in range(4)]
    assert [ranges[1] for ranges in parts] == [(64, 80), (64, 80), (80, 96), (80, 96)]
    assert sharded_config(config, mesh_of(4, 3)).kv_copies == 2
    assert sharded_config(config, mesh_of(4, 3)).all_kv_heads == config.num_kv_heads


@given(st.data())
def test_reading_ranges_is_indexing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))

    def ranges(most: int) -> Ranges:
        ends = sorted(
            data.draw(st.lists(st.integers(0, most), min_size=2, max_size=4, unique=True).filter(lambda ends: len(ends) % 2 == 0))
        )
        return tuple(zip(ends[::2], ends[1::2], strict=True))

    rows, columns = ranges(height), (data.draw(st.booleans()) and ranges(width)) or ((0, width),)
    path, matrix = tmp_path_factory.mktemp("ranges") / "raw", torch.arange(height * width, dtype=torch.int16).view(height, width)
    path.write_bytes(b"..." + matrix.view(torch.float16).view(torch.uint8).numpy().tobytes())
    header = TensorHeader(file=path, dtype="F16", shape=(height, width), start=3, stop=3 + 2 * height * width)
    expected = torch.cat([matrix[a:b] for a, b in rows])
    expected = torch.cat([expected[:, a:b] for a, b in columns], 1)
    flat = torch.empty(expected.numel(), dtype=torch.float16)
    with path.open("rb", buffering=0) as file:
        _read_into(flat, header, file, torch.empty(4 << 20, dtype=torch.uint8), rows, columns)
    assert torch.equal(flat.view(torch.int16), expected.flatten())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["cpu", "gpu"])
def test_quantised_parts(kind: Any, layout: str) -> None:
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(0))
    matrix = quantise(weight, kind)
    matrix = gpu_layout(matrix) if layout == "gpu" else matrix
    whole = matrix.dequantised(torch.float32)
    assert torch.equal(row_ranges(matrix, [(4, 9), (40, 48)]).dequantised(torch.float32), torch.cat([whole[4:9], whole[40:48]]))
    assert torch.equal(column_range(matrix, 128, 384).dequantised(torch.float32), whole[:, 128:384])
    assert torch.equal(column_range(matrix, 384, 512).dequantised(torch.float32), whole[:, 384:])


@pytest.mark.parametrize("experts", [(), (3,)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("width", "cuts"), [(1536, (0, 192, 384)), (768, (576, 768)), (400, (208, 400)), (400, (384, 400)), (320, (16, 48))]
)
def test_parts_between_groups(width: int, cuts: tuple[int, ...], layout: str, kind: Any, *, zeros: bool, experts: tuple[int, ...]) -> None:
    """A rank has 192 columns of an expert of Qwen3-235B-A22B, if eight share it, and blocks of FP8 have 128."""
    random = torch.Generator().manual_seed(0)
    matrix = quantise(torch.randn(*experts, 8, width, generator=random), kind, 128)
    if zeros and kind != "fp8":
        matrix = replace(matrix, zeros=torch.randint(-3, 4, matrix.scales.shape, generator=random, dtype=torch.int16))
    whole = matrix.dequantised(torch.float32)
    matrix = gpu_layout(matrix) if layout == "gpu" else matrix
    for first, last in pairwise(cuts):
        part = column_range(matrix, first, last)
        assert part.group >= 16
        assert tuple(part.scales.shape) == (*experts, 8, -(-(last - first) // part.group))
        assert torch.equal(part.dequantised(torch.float32), whole[..., first:last])


def test_blocks_of_rows_with_one_scale() -> None:
    codes = torch.randint(-8, 8, (256, 256), dtype=torch.int8)
    matrix = QuantisedMatrix(codes=codes, scales=torch.rand(2, 2) + 0.5, columns=256, group=128, rows=128)
    whole = matrix.dequantised(torch.float32)
    assert row_ranges(matrix, [(128, 256)]).rows == 128
    for ranges in ([(128, 256)], [(0, 64), (128, 192)]):
        assert torch.equal(row_ranges(matrix, ranges).dequantised(torch.float32), torch.cat([whole[a:b] for a, b in ranges]))


@pytest.mark.parametrize(
    ("first", "last", "changes", "told"),
    [
        (8, 136, {}, "columns 8 to 136 cut groups of 128 columns into groups of 8, fewer than 16"),
        (0, 128, {"order": torch.arange(256, dtype=torch.int32)}, "desc_act"),
    ],
)
def test_where_a_quantised_matrix_cannot_be_cut(first: int, last: int, changes: dict[str, Any], told: str) -> None:
    matrix = replace(quantise(torch.randn(8, 256), "int4"), **changes)
    with pytest.raises(nv.InvalidRequestError, match=told):
        column_range(matrix, first, last)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_rounded_while_it_is_loaded(tmp_path: Path, kind: Any) -> None:
    config = tiny_config(hidden_size=128, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)
    save_hf_folder(tmp_path, config)

    def run(mesh: Mesh | None) -> Any:
        model = nv.load_model(tmp_path, "cpu", "float32", quantization=kind, mesh=mesh)
        llm = nv.LLM(model, num_pages=32, compile=False)
        reply = llm.generate(["Once upon a time"], nv.SamplingParams(temperature=0, max_tokens=8))[0]
        return reply.token_ids, model.quantization

    assert run_ranks(run, 2) == [run(None)] * 2


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_experts_that_eight_ranks_round_while_they_load(tmp_path: Path, kind: Any) -> None:
    config = tiny_config("Qwen3MoeForCausalLM", hidden_size=128, num_heads=8, num_kv_heads=2, head_dim=64)
    save_hf_folder(tmp_path, config)

    def run(mesh: Mesh | None) -> tuple[list[int], Any]:
        llm = nv.LLM(nv.load_model(tmp_path, "cpu", "float32", quantization=kind, mesh=mesh), num_pages=32, compile=False)
        reply = llm.generate(["Once upon a time"], nv.SamplingParams(temperature=0, max_tokens=8))[0]
        return reply.token_ids, llm.model.quantization

    alone = run(None)
    assert kind in alone[1]
    assert run_ranks(run, 8) == [alone] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_parts_are_parts_of_the_rounded_whole(tmp_path: Path, kind: Any) -> None:
    config = tiny_config(hidden_size=128, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)
    save_hf_folder(tmp_path, config)
    whole = nv.load_model(tmp_path, "cpu", quantization=kind).params
    parts = run_ranks(lambda mesh: (nv.load_model(tmp_path, "cpu", quantization=kind, mesh=mesh).params, mesh), 2)
    for params, mesh in parts:
        for name in ("qkv", "o", "gate_up", "down"):
            entire = getattr(whole.layers[1], name).dequantised(torch.float32)
            own = cut(part_of(name, tuple(entire.shape), config, mesh), entire)
            assert torch.equal(getattr(params.layers[1], name).dequantised(torch.float32), torch.as_tensor(own)), name


def test_weights_of_one_rank_that_have_no_codes_are_refused_on_all(tmp_path: Path) -> None:
    """The others would wait for the rank that refuses them."""
    save_hf_folder(tmp_path, tiny_config(hidden_size=128, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64))
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(file)
    tensors[name][-1, -1] = torch.nan
    save_file(tensors, file)

    def run(mesh: Mesh) -> str:
        with pytest.raises(nv.CheckpointError) as found:
            nv.load_model(tmp_path, "cpu", "float32", quantization="int8", mesh=mesh)
        return str(found.value)

    what = "weights that are infinite or NaN in float32, which have no codes"
    assert run_ranks(run, 2, seconds=60.0) == [f"another rank's part of the checkpoint has {what}", f"{file}: {name} has {what}"]


@pytest.mark.parametrize(("ranks", "inner"), [(2, 384), (4, 448), (2, 608), (4, 96), (1, 200)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_ranks_that_share_a_scale_of_4_bits(tmp_path: Path, architecture: str, ranks: int, inner: int) -> None:
    """Parts that begin between groups get the codes and scales of the whole matrix."""
    sizes = {"hidden_size": 128, "intermediate_size": inner, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
    config = tiny_config(architecture, **sizes)
    if config.moe is not None:
        config = replace(config, moe=replace(config.moe, intermediate_size=inner))
    save_hf_folder(tmp_path, config)

    def load(mesh: Mesh | None) -> tuple[Any, Mesh | None]:
        return nv.load_model(tmp_path, "cpu", "float32", quantization="int4", mesh=mesh).params.layers[1], mesh

    def down(layer: Any) -> Any:
        return layer.down if layer.experts is None else layer.experts.down

    whole = down(load(None)[0]).dequantised(torch.float32)
    for layer, mesh in run_ranks(load, ranks):
        own = cut(part_of("down", tuple(whole.shape), config, mesh), whole)
        assert torch.equal(down(layer).dequantised(torch.float32), torch.as_tensor(own))


def test_groups_that_ranks_would_cut_too_small_are_refused(tmp_path: Path) -> None:
    save_hf_folder(tmp_path, tiny_config(hidden_size=128, intermediate_size=272, num_heads=4, num_kv_heads=2, head_dim=64))
    told = (
        r"mlp\.down_proj cannot be shared by 2 ranks: quantization='int4': columns \d+ to \d+ cut groups of 128 columns into groups of 8, "
        r"fewer than 16; choose another number of ranks or quantization='int8'"
    )
    with pytest.raises(nv.CheckpointError, match=told):
        run_ranks(lambda mesh: nv.load_model(tmp_path, "cpu", quantization="int4", mesh=mesh), 2)


def test_zeros_for_the_biases_of_others() -> None:
    bias = torch.ones(4)
    assert cut(part_of("o_bias", (4,), tiny_config(), mesh_of(2, 0)), bias) is bias
    assert torch.equal(torch.as_tensor(cut(part_of("o_bias", (4,), tiny_config(), mesh_of(2, 1)), bias)), torch.zeros(4))
    assert math.prod(cut(part_of("input_norm", (4,), tiny_config(), mesh_of(2, 1)), bias).shape) == 4
