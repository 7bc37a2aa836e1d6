"""Quantised checkpoints on ranks that cut their groups of columns: each rank has its part of the weights that the checkpoint stands for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm.config import Mesh
from nanovllm.errors import CheckpointError
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.testing.models import tiny_config
from tests.loading.quantisation.encoders import ENCODERS, FP8, Encoder, awq, block_fp8, compressed, gptq, gptq_config, packed_rows
from tests.loading.quantisation.test_formats import folders, leaves, load, require_equal

# Groups and blocks of 128 columns, as published checkpoints have them.
WIDE = {
    "fp8 in blocks": Encoder(
        config={**FP8, "weight_block_size": [128, 128]}, encode=block_fp8(128, "weight_scale_inv", torch.bfloat16), kind="fp8"
    ),
    "compressed W4A16, asymmetric": Encoder(
        config=compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, symmetric=False, type="int"),
        encode=packed_rows(4, 128, True), kind="int4",
    ),
    "gptq": Encoder(config=gptq_config(4, 128, sym=True, label="gptq"), encode=gptq(4, 128, symmetric=True, version=1), kind="int4"),
    "awq": Encoder(
        config={"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, encode=awq(128), kind="int4"
    ),
}  # fmt: skip
SIZES = {"hidden_size": 128, "num_heads": 16, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 128}
THREE = {**SIZES, "num_heads": 12, "num_kv_heads": 3}


@pytest.mark.parametrize(("ranks", "inner"), [(2, 384), (8, 1536), (8, 384), (3, 576)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("name", WIDE)
def test_ranks_cut_groups(tmp_path: Path, name: str, architecture: str, ranks: int, inner: int) -> None:
    """Eight ranks have 192 of the 1,536 columns of an expert of Qwen3-235B-A22B."""
    config = tiny_config(architecture, intermediate_size=inner, **(THREE if ranks == 3 else SIZES))
    if config.moe is not None:
        config = replace(config, moe=replace(config.moe, num_experts=2, top_k=1, intermediate_size=inner))
    quantised, plain = folders(tmp_path, WIDE[name], config)

    def run(mesh: Mesh) -> list[tuple[int, torch.Size]]:
        own = load(quantised, mesh=mesh)
        require_equal(own, load(plain, mesh=mesh), {WIDE[name].kind})
        return [(leaf.group, leaf.scales.shape) for leaf in leaves(own) if isinstance(leaf, QuantisedMatrix)]

    first, *others = run_ranks(run, ranks)
    assert all(other == first for other in others), "ranks have groups of different sizes"
    assert min(group for group, _ in first) == {(2, 384): 64, (8, 1536): 32, (8, 384): 16, (3, 576): 64}[ranks, inner]


def test_all_ranks_refuse_what_one_refuses(tmp_path: Path) -> None:
    """The columns of the third rank alone could keep groups of 16."""
    quantised, _ = folders(tmp_path, WIDE["fp8 in blocks"], tiny_config(intermediate_size=408, **THREE))

    def run(mesh: Mesh) -> str:
        with pytest.raises(CheckpointError) as found:
            load(quantised, mesh=mesh)
        return str(found.value)

    assert all("cut groups of 128 columns into groups of 8, fewer than 16" in told for told in run_ranks(run, 3))


def test_groups_that_would_be_too_small_are_refused(tmp_path: Path) -> None:
    quantised, _ = folders(tmp_path, WIDE["fp8 in blocks"], tiny_config(intermediate_size=272, **SIZES))
    told = r"mlp\.down_proj cannot be shared by 2 ranks: columns \d+ to \d+ cut groups of 128 columns into groups of 8, fewer than 16"
    with pytest.raises(CheckpointError, match=told):
        run_ranks(lambda mesh: load(quantised, mesh=mesh), 2)


def test_columns_with_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    quantised, _ = folders(tmp_path, ENCODERS["gptq in the order of activations"], tiny_config(intermediate_size=96, **SIZES))
    with pytest.raises(CheckpointError, match=r"cannot be shared by 2 ranks: .*desc_act"):
        run_ranks(lambda mesh: load(quantised, mesh=mesh), 2)
