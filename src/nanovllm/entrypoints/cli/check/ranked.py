"""`nanovllm check --tensor-parallel-size`: the layers of each rank's part, and the whole model that the parts must amount to."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nanovllm.entrypoints.ranks.examined import examine_parts
from nanovllm.errors import NanoVLLMError
from nanovllm.models.check.parts import Exact, PartsReport, exact
from nanovllm.models.check.report import CheckReport
from nanovllm.models.check.sample_text import sample_tokens
from nanovllm.models.model import Model
from nanovllm.state.device_errors import out_of_memory

ENGINE: Mapping[str, Any] = {"num_pages": 4, "max_num_seqs": 1, "compile": False, "check": False}  # it runs no requests
PATIENCE = 3600.0  # seconds that ranks wait for each other


def examine_ranks(
    name: str, devices: tuple[str, ...], loading: Mapping[str, Any], num_tokens: int, tuning: Any
) -> tuple[CheckReport, Exact]:
    """Start the ranks, compare their layers, and end them. Returns the report, and what they compute in float64 together.

    Raises:
        NanoVLLMError: As `LLM` and `examine`.
    """
    from nanovllm.entrypoints.cli.bench.ranked import ranked_engine

    with ranked_engine(name, devices, loading, ENGINE, PATIENCE) as (model, state):
        return examine_parts(model, state, num_tokens, tuning)[1]


def whole_model(places: Sequence[Callable[[], Model]], num_tokens: int) -> tuple[Exact | None, str]:
    """What the whole model computes in float64, in the first place that has the memory for it.

    Args:
        places: Each loads the model to a device, or raises a `NanoVLLMError`.
        num_tokens: Tokens of the text.

    Returns:
        The results, or None and why there are none.
    """
    why = ""
    for load in places:
        try:
            model = load()
            return exact(model, sample_tokens(model, num_tokens)), ""
        except Exception as error:
            if not isinstance(error, NanoVLLMError) and not out_of_memory(error):
                raise
            why = str(error)
        finally:
            model = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the ranks need it
    return None, why


def parts_text(ranks: int, found: PartsReport | None, why: str) -> str:
    """The comparison with the whole model in words. `why`: why there is none."""
    if found is None:
        return f"The parts of {ranks} ranks were not compared with the whole model: {why}"
    verdict = "are the whole model" if found.holds else "are NOT the whole model"
    return (
        f"In float64 the parts of {ranks} ranks {verdict}, which ran on {found.device}. Over {found.num_tokens} tokens the relative "
        f"error\nof the last hidden states is {found.hidden:.1e}, of the two largest logits {found.logits:.1e}; bound: {found.bound:.1e}.\n"
        f"The most probable next token is the same after {found.same} of them."
    )
