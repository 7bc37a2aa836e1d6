"""`Held`: what the functions of an engine's process take and return."""

from dataclasses import dataclass

from nanovllm.entrypoints.server.engine_metrics import EngineMetrics
from nanovllm.entrypoints.server.named_chunks import NamedChunks
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """What an engine's process holds between two steps. A function that changes it returns the next one.

    Attributes:
        model: The model.
        state: The newest state.
        named: The chunks of front ends.
        metrics: What was measured. It is no value: it counts in place.
    """

    model: Model
    state: EngineState
    named: NamedChunks
    metrics: EngineMetrics
