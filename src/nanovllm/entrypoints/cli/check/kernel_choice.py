"""Which kernels will run a model's steps, and the reason if they are not the fast kernels."""

from dataclasses import dataclass

import torch

from nanovllm.config import ModelConfig
from nanovllm.models.fast.path import against
from nanovllm.models.init_params import without_memory
from nanovllm.ops.backends import against_flashinfer, own_kernels

PAGE_SIZE = 16  # any value: the answer does not depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of decode steps and of prompts, in words.

    `against` is the reason against the fast kernels, or empty. `captured`: whether decode steps run in CUDA graphs.
    """

    decode: str
    prompts: str
    against: str
    captured: bool = False


def kernels(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, foreign: bool = False, kv_dtype: str | None = None
) -> Kernels:
    """The kernels that `init_state` chooses by default for a model on a device.

    `foreign`: the model runs through transformers. Whether its matrices are quantised does not matter. `kv_dtype`: the option of
    `init_state`.
    """
    if foreign:
        how = "transformers' module, attention in plain torch"
        return Kernels(decode=how, prompts=how, against="the architecture is not built in")
    why = against(without_memory(config, dtype), config, device, dtype)
    if device.type != "cuda":
        return Kernels(decode="plain torch" if why else "C", prompts="plain torch", against=why)
    if kv_dtype is not None and own_kernels(device, dtype):
        how = "compiled layers" if why else "fused kernels"
        return Kernels(decode=f"{how} in CUDA graphs", prompts=f"{how}, attention by nanovllm's own kernel", against=why, captured=True)
    if other := against_flashinfer(device, dtype, config.head_dim, PAGE_SIZE):
        how = "compiled layers, attention in plain torch"
        return Kernels(decode=how, prompts=how, against=f"FlashInfer does not support it: {other}")
    how = "compiled layers" if why else "fused kernels"
    return Kernels(decode=f"{how} in CUDA graphs", prompts=f"{how}, attention by FlashInfer", against=why, captured=True)
