"""The comparison of `nanovllm check` on all ranks of an engine."""

import os

import torch

from nanovllm.engine.mirrored import mirrored
from nanovllm.models.check.examine import examined
from nanovllm.models.check.parts import Exact, exact_of
from nanovllm.models.check.report import CheckReport
from nanovllm.models.model import Model
from nanovllm.models.tuning.choose import cuts_for
from nanovllm.state.engine_state import EngineState


@mirrored
@torch.no_grad()
def examine_parts(
    model: Model, state: EngineState, num_tokens: int, tuning: bool | str | os.PathLike[str] | None
) -> tuple[EngineState, tuple[CheckReport, Exact]]:
    """Compare the layers of all ranks as `examine` does those of one, and return what they compute in float64 together.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine, which stays as it is.
        num_tokens: Tokens of the text.
        tuning: The tile configurations, as in `init_state`.
    """
    report, compared = examined(model, num_tokens, cuts=cuts_for(model, tuning))
    return state, (report, exact_of(model, compared.final))
