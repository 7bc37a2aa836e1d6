"""`EagerExecutor`: steps as plain function calls, as on a CPU."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm import models
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.executor.agreed_memory import prepared
from nanovllm.executor.batch import HostBatch, decode_batch, prefill_batch, to_device
from nanovllm.executor.carry import decode_carry, draw_first, for_a_session, to_host, with_masks
from nanovllm.executor.cascade_policy import Cascades
from nanovllm.executor.decode import decode_step
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.executor import Drawn, Forward, Masks
from nanovllm.executor.row_processing import kept, with_processing
from nanovllm.executor.scoring import Scored, asked_logprobs, score_batch, whole_prompts
from nanovllm.executor.step_program import StepProgram
from nanovllm.models.common.sharding import in_parts
from nanovllm.models.model import Model
from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.ops.distributed.collectives import require_ranks
from nanovllm.state.kv_cache import KVState
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Int64, Tensor


class EagerExecutor:
    """Runs each step as plain function calls, without graphs or running ahead."""

    def __init__(self, limits: EngineConfig, forward: Forward = models.forward, cascades: Cascades | None = None):
        """Prepare an executor for an engine.

        Args:
            limits: The engine's limits. The page after those of the pool is the dummy page.
            forward: The model function, or its compiled form from `compiled_forward`.
            cascades: Plans that read shared pages once, or None.
        """
        self._layout = {"page_size": limits.page_size, "dummy_page": limits.num_pages}
        self._width = limits.max_model_len + 1  # of the tables of tokens that processors read
        self._forward, self._cascades = forward, cascades
        self._plan: CascadePlan | None = None  # of the last loaded carry; `_sessions` keeps the plans of sessions
        self._sessions: dict[int, CascadePlan | None] = {}
        self._program: StepProgram | None = None

    def prefill(
        self,
        model: Model,
        kv: KVState,
        rows: Seq[tuple[Sequence, int]],
        *,
        draw: bool = True,
        frames: Frames | None = None,
        masks: Masks | None = None,
    ) -> tuple[Drawn | None, KVState]:
        """Donates `kv`. Run prompt tokens in one call, and sample for the complete sequences."""
        config = in_parts(model.config)
        logits, kv = self._prompts(model, kv, prefill_batch(rows, draw=draw, frames=frames, **self._layout), config)
        drawn = draw_first(logits, rows, model, config, self._width, masks) if draw else None
        require_ranks(model.config.mesh)
        return drawn, kv

    def score(
        self,
        model: Model,
        kv: KVState,
        rows: Seq[tuple[Sequence, int]],
        asked: Int64[np.ndarray, "K 2"],
        *,
        num_top: int = 0,
        frames: Frames | None = None,
    ) -> tuple[Scored, KVState]:
        """Donates `kv`. Run prompt tokens in one call, and look the log-probabilities up in its logits."""
        logits, kv = self._prompts(model, kv, score_batch(rows, asked, frames=frames, **self._layout), model.config)
        return asked_logprobs(logits, asked, num_top), kv

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Return a carry over new tensors."""
        host = decode_batch(rows, frames=frames, **self._layout)
        return with_processing(decode_carry(model, kv, rows, host, self._follow(host)), rows, self._width)

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Donates `carry`. Build the batch anew, since pages have changed, and keep the sampling tensors."""
        host = decode_batch(rows, frames=frames, **self._layout)
        plan = self._follow(host)
        return replace(carry, batch=to_device(host, carry.active.device, plan, plan))

    def narrow(
        self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, grew: bool = False, frames: Frames | None = None
    ) -> DecodeCarry:
        """Donates `carry`. Load the remaining rows as a new carry."""
        return self.load(model, carry.kv, rows, frames=frames)

    def decode(self, model: Model, carry: DecodeCarry, masks: Masks | None = None) -> tuple[DecodeCarry, Drawn]:
        """Donates `carry`. Run the step and wait for its results."""
        num_rows = len(carry.active)
        prepared(model, num_rows, num_rows, lambda: None)
        if masks is not None:  # the masks of the step before are replaced
            carry = replace(carry, sampling=with_masks(carry.sampling, masks, len(carry.active), model.config.vocab_size))
        carry, out = decode_step(model.params, carry, in_parts(model.config), forward=self._forward)
        drawn = to_host(out, kept(carry.processing))
        require_ranks(model.config.mesh)
        return carry, drawn

    def take_discarded_count(self) -> int:
        """Return 0: this executor never runs ahead."""
        return 0

    def begin(
        self,
        model: Model,
        kv: KVState,
        rows: Seq[Sequence],
        ticket: int,
        *,
        frames: Frames | None = None,
        branching: bool = False,
        fill: bool = True,
    ) -> DecodeCarry:
        """Return a carry over new tensors, and keep its plan until `end`."""
        host = decode_batch(rows, frames=frames, **self._layout)
        plan = None if self._cascades is None or branching else self._cascades.decode(host)
        self._sessions[ticket] = plan
        carry = decode_carry(model, kv, rows, host, 0 if plan is None else plan.handle)
        prompt = None if fill else to_device(whole_prompts(rows, frames=frames, **self._layout), model.device)
        return for_a_session(replace(carry, prompt=prompt), self._program_of(model))

    def end(self, ticket: int) -> None:
        """Drop the plan of this session."""
        self._sessions.pop(ticket, None)

    def captured(self, function: Callable[..., Any], carry: DecodeCarry, *inputs: Any) -> Callable[..., Any]:
        """The function as it is."""
        return function

    def _prompts(self, model: Model, kv: KVState, host: HostBatch, config: ModelConfig) -> tuple[Tensor, KVState]:
        plan = 0 if self._cascades is None else self._cascades.prompts(host)
        num_tokens, asked = len(host.input_ids), host.logit_indices
        batch = prepared(model, num_tokens, num_tokens if asked is None else len(asked), lambda: to_device(host, model.device, plan, plan))
        return self._forward(model.params, kv, batch, config)

    def _program_of(self, model: Model) -> StepProgram | None:
        """The model function for a session's steps. None for a model that transformers runs."""
        if model.foreign:
            return None
        if self._program is None or self._program.config is not model.config:
            self._program = StepProgram(model, self._forward)
        return self._program

    def _follow(self, host: HostBatch) -> int:
        """Plan for the pages that the rows share, and return the plan's handle; 0 if each row reads its pages by itself."""
        self._plan = None if self._cascades is None else self._cascades.decode(host)
        return 0 if self._plan is None else self._plan.handle
