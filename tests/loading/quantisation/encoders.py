"""Random matrices in the formats of checkpoints, written bit by bit in numpy, with the weights that they stand for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator

Encoded = tuple[dict[str, torch.Tensor], np.ndarray]  # tensors by suffix, and the matrix [N, K] in float64


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack unsigned codes along the last axis, lowest bits first, into int32 words."""
    each = 32 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)]).astype(np.uint64)
    shifted = padded.reshape(*padded.shape[:-1], -1, each) << (np.arange(each, dtype=np.uint64) * np.uint64(bits))
    return torch.from_numpy(shifted.sum(-1).astype(np.uint32).view(np.int32))


def scales_of(random: Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(random.uniform(0.01, 0.03, shape)).to(dtype)


def spread(values: Any, shape: tuple[int, int], rows: int, columns: int) -> np.ndarray:
    """Repeat block values over a matrix."""
    return (
        np.asarray(values.double() if isinstance(values, torch.Tensor) else values)
        .repeat(rows, 0)
        .repeat(columns, 1)[: shape[0], : shape[1]]
    )


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A format: the `quantization_config`, and a function that makes a random matrix."""

    config: dict[str, Any]
    encode: Callable[[Generator, int, int], Encoded]
    kind: str


def fp8_codes(random: Generator, n: int, k: int) -> tuple[torch.Tensor, np.ndarray]:
    """Random bytes, and what they are as e4m3: a sign, four bits of exponent with the bias 7, three bits of mantissa. Small exponents."""
    codes = random.integers(0, 256, (n, k)).astype(np.uint8) & 0xBF  # exponents below 8, so no NaN
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0)) * np.where(codes >> 7, -1, 1)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), values * 1.0


def block_fp8(block: int, name: str, dtype: torch.dtype) -> Callable[[Generator, int, int], Encoded]:
    def encode(random: Generator, n: int, k: int) -> Encoded:
        stored, values = fp8_codes(random, n, k)
        scales = scales_of(random, -(-n // block), -(-k // block), dtype=dtype)
        return {"weight": stored, name: scales}, values * spread(scales, (n, k), block, block)

    return encode


def fp8_rows(tensor: bool) -> Callable[[Generator, int, int], Encoded]:
    def encode(random: Generator, n: int, k: int) -> Encoded:
        stored, values = fp8_codes(random, n, k)
        scales = scales_of(random, 1) if tensor else scales_of(random, n, 1, dtype=torch.bfloat16)
        extra = {"input_scale": torch.ones(1)} if tensor else {}
        return {"weight": stored, "weight_scale": scales, **extra}, values * scales.double().numpy().reshape(-1, 1)

    return encode


def int8_rows(zeros: bool) -> Callable[[Generator, int, int], Encoded]:
    def encode(random: Generator, n: int, k: int) -> Encoded:
        codes, scales = random.integers(-128, 128, (n, k)), scales_of(random, n, 1)
        middle = random.integers(-100, 100, (n, 1)) if zeros else np.zeros((n, 1), int)
        stored = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scales}
        return stored | ({"weight_zero_point": torch.from_numpy(middle.astype(np.int8))} if zeros else {}), (
            codes - middle
        ) * scales.double().numpy()

    return encode


def packed_rows(bits: int, group: int, zeros: bool, dtype: torch.dtype = torch.bfloat16) -> Callable[[Generator, int, int], Encoded]:
    def encode(random: Generator, n: int, k: int) -> Encoded:
        wide, half = group or k, 2 ** (bits - 1)
        codes, scales = random.integers(-half, half, (n, k)), scales_of(random, n, -(-k // wide), dtype=dtype)
        middle = random.integers(-half, half, scales.shape) if zeros else np.zeros(scales.shape, int)
        stored = {"weight_packed": words(codes + half, bits), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
        if zeros:
            stored["weight_zero_point"] = words((middle + half).T, bits).T.contiguous()
        return stored, (codes - spread(middle, (n, k), 1, wide)) * spread(scales, (n, k), 1, wide)

    return encode


def gptq(bits: int, group: int, *, symmetric: bool, version: int, act_order: bool = False) -> Callable[[Generator, int, int], Encoded]:
    def encode(random: Generator, n: int, k: int) -> Encoded:
        wide, top = group or k, 2**bits
        groups = -(-k // wide)
        codes, scales = random.integers(0, top, (k, n)), scales_of(random, groups, n, dtype=torch.float16)
        stored_zeros = random.integers(0, top, (groups, n))
        middle = np.full((groups, n), top // 2) if symmetric else stored_zeros + (version == 1)
        where = np.arange(k) // wide
        if act_order:
            where = np.random.default_rng(k).permutation(where)  # the same for all matrices of as many inputs, as GPTQ makes it
        stored = {
            "qweight": words(codes.T, bits).T.contiguous(), "qzeros": words(stored_zeros, bits), "scales": scales,
            "g_idx": torch.from_numpy(where.astype(np.int32)),
        }  # fmt: skip
        return stored, ((codes - middle[where]) * scales.double().numpy()[where]).T

    return encode


def awq(group: int) -> Callable[[Generator, int, int], Encoded]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def encode(random: Generator, n: int, k: int) -> Encoded:
        groups = -(-k // group)
        codes, middle, scales = (
            random.integers(0, 16, (k, n)),
            random.integers(0, 16, (groups, n)),
            scales_of(random, groups, n, dtype=torch.float16),
        )

        def pack(values: np.ndarray) -> torch.Tensor:
            return words(values.reshape(len(values), -1, 8)[:, :, order].reshape(len(values), -1), 4)

        where = np.arange(k) // group
        weight = (codes - middle[where]) * scales.double().numpy()[where]
        return {"qweight": pack(codes), "qzeros": pack(middle), "scales": scales}, weight.T

    return encode


def compressed(stored: str, **weights: Any) -> dict[str, Any]:
    usual = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}
    group = {"targets": ["Linear"], "weights": {**usual, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def gptq_config(bits: int, group: int, *, sym: bool, label: str, desc_act: bool = False) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act, "checkpoint_format": label}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
INT = {"type": "int"}
ENCODERS = {
    "fp8 in blocks": Encoder(config=FP8, encode=block_fp8(16, "weight_scale_inv", torch.float32), kind="fp8"),
    "fp8 in blocks, bfloat16 scales": Encoder(config=FP8, encode=block_fp8(16, "weight_scale_inv", torch.bfloat16), kind="fp8"),
    "fp8 in ragged blocks": Encoder(
        config={**FP8, "weight_block_size": [20, 20]}, encode=block_fp8(20, "weight_scale_inv", torch.float32), kind="fp8"
    ),
    "compressed fp8 dynamic": Encoder(config=compressed("float-quantized"), encode=fp8_rows(False), kind="fp8"),
    "compressed fp8 static": Encoder(config=compressed("float-quantized", strategy="tensor"), encode=fp8_rows(True), kind="fp8"),
    "compressed fp8 in blocks": Encoder(
        config=compressed("float-quantized", strategy="block", block_structure=[16, 16]),
        encode=block_fp8(16, "weight_scale", torch.bfloat16), kind="fp8",
    ),
    "compressed W8A8": Encoder(config=compressed("int-quantized", **INT), encode=int8_rows(False), kind="int8"),
    "compressed W8A8, asymmetric": Encoder(config=compressed("int-quantized", symmetric=False, **INT), encode=int8_rows(True), kind="int8"),
    "compressed W8A16": Encoder(config=compressed("pack-quantized", **INT), encode=packed_rows(8, 0, False), kind="int8"),
    "compressed W4A16": Encoder(
        config=compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, **INT),
        encode=packed_rows(4, 16, False), kind="int4",
    ),
    "compressed W4A16, asymmetric": Encoder(
        config=compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False, **INT),
        encode=packed_rows(4, 16, True), kind="int4",
    ),
    "gptq": Encoder(
        config=gptq_config(4, 16, sym=True, label="gptq"), encode=gptq(4, 16, symmetric=True, version=1), kind="int4"
    ),
    "gptq, asymmetric": Encoder(
        config=gptq_config(4, 16, sym=False, label="gptq"), encode=gptq(4, 16, symmetric=False, version=1), kind="int4"
    ),
    "gptq of version 2, asymmetric": Encoder(
        config=gptq_config(4, 16, sym=False, label="gptq_v2"), encode=gptq(4, 16, symmetric=False, version=2), kind="int4"
    ),
    "gptq of 8 bits": Encoder(
        config=gptq_config(8, 32, sym=False, label="gptq"), encode=gptq(8, 32, symmetric=False, version=1), kind="int8"
    ),
    "gptq with a scale per row": Encoder(
        config=gptq_config(4, -1, sym=True, label="gptq"), encode=gptq(4, 0, symmetric=True, version=1), kind="int4"
    ),
    "gptq in the order of activations": Encoder(
        config=gptq_config(4, 16, sym=True, label="gptq", desc_act=True), encode=gptq(4, 16, symmetric=True, version=1, act_order=True),
        kind="int4",
    ),
    "awq": Encoder(
        config={"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, encode=awq(16), kind="int4"
    ),
}  # fmt: skip
