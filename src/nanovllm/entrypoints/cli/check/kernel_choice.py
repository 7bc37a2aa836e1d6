"""Which kernels will run a model's steps, and why not the fast ones."""

from dataclasses import dataclass

import torch

from nanovllm.config import ModelConfig
from nanovllm.models.fast.path import against
from nanovllm.models.init_params import without_memory
from nanovllm.ops.backends import against_flashinfer

PAGE_SIZE = 16  # of which FlashInfer's kernels do not depend


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What runs decode steps and prompts, and what stands against the fast forms; empty where nothing does. `captured`: in CUDA graphs."""

    decode: str
    prompts: str
    against: str
    captured: bool = False


def kernels(config: ModelConfig, device: torch.device, dtype: torch.dtype, *, foreign: bool = False) -> Kernels:
    """What runs the model's steps on a device, as `init_state` decides by default; `foreign`: transformers' module."""
    if foreign:
        how = "transformers' module, attention in plain torch"
        return Kernels(decode=how, prompts=how, against="the architecture is not built in")
    why = against(without_memory(config, dtype), config, device, dtype)
    if device.type != "cuda":
        return Kernels(decode="plain torch" if why else "C", prompts="plain torch", against=why)
    if other := against_flashinfer(device, dtype, config.head_dim, PAGE_SIZE):
        how = "compiled layers, attention in plain torch"
        return Kernels(decode=how, prompts=how, against=f"FlashInfer does not serve it: {other}")
    how = "compiled layers" if why else "fused kernels"
    return Kernels(decode=f"{how} in CUDA graphs", prompts=f"{how}, attention by FlashInfer", against=why, captured=True)
