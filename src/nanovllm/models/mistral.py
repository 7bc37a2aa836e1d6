"""Mistral (Jiang et al., 2023): a Llama whose layers may have a sliding window."""

from nanovllm.config import ModelConfig
from nanovllm.models import llama
from nanovllm.models.common.hf_config import HF, SLIDING, read_sizes, read_windows
from nanovllm.models.common.params import ParamInfo, Params


def config_from_hf(hf: HF) -> ModelConfig:
    """The config of a `MistralForCausalLM` checkpoint. Raises `CheckpointError` for a setting that this file does not implement."""
    return read_sizes(hf, "MistralForCausalLM", max_positions=131072, bos=1, eos=2, windows=read_windows(hf, SLIDING, 4096))


def param_table(c: ModelConfig) -> Params[ParamInfo]:
    """Every parameter's shape and its tensors in the checkpoint: Llama's."""
    return llama.param_table(c)
