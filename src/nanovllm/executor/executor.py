"""How steps are executed: what cannot be a value lives here, and nowhere else.

`Runtime` owns the donation lease and an executor. `EagerExecutor` calls the functions as they stand; `GraphExecutor` (cuda_graphs.py)
compiles the layer once, captures the decode step in CUDA graphs, and owns their static buffers and the attention plans.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from nanovllm import models
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.executor.attention_plans import Cascades
from nanovllm.executor.batch import Batch, HostBatch, decode_batch, prefill_batch, to_device
from nanovllm.executor.decode import DecodeCarry, DecodeOutput, decode_step
from nanovllm.loading.load_model import Model
from nanovllm.models.fast.choice import FastChoice, LayerFunction
from nanovllm.models.fast.cuts import Cuts, with_cuts
from nanovllm.ops.attention.cascade import CascadePlan
from nanovllm.sampling import sampler as sample
from nanovllm.state.engine_state import Lease
from nanovllm.state.kv_cache import KVState, pages_for
from nanovllm.state.pool_sizes import dummies
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Tensor

Forward = Callable[..., tuple[Tensor, KVState]]
COMPILED_PROMPTS = ((1, 8), (2, 8))  # rows and tokens: all that compiled layers distinguish
COMPILES = 32  # of an engine's layer: one row, any other number, prompts; first and others, with a window or not; the unforeseen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """What a step drew, on the host: tokens `[R]`, and log-probabilities where they were asked for."""

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def at(self, rows: np.ndarray) -> "Drawn":
        """What some of the rows drew, in this order."""

        def chosen(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else array[rows]

        return Drawn(
            token_ids=self.token_ids[rows],
            logprobs=chosen(self.logprobs),
            top_ids=chosen(self.top_ids),
            top_logprobs=chosen(self.top_logprobs),
        )


@runtime_checkable
class Executor(Protocol):
    """Runs the two kinds of step. Page tables, slots and sampling tensors come from the sequences' own values, and from `frames`, those of
    their pages, where layers have windows."""

    def prefill(
        self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], *, draw: bool = True, frames: Frames | None = None
    ) -> tuple[Drawn | None, KVState]:
        """Donates `kv`. Run prompt tokens; draw for the sequences that are whole afterwards (None where none is, or not `draw`)."""
        ...

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """The carry of a decode step over these rows."""
        ...

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Donates `carry`. The same rows after some got other pages."""
        ...

    def narrow(
        self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, frames: Frames | None = None
    ) -> DecodeCarry:
        """Donates `carry`. Of its rows those at the places `keep`, ascending, go on: `rows`. The others have ended."""
        ...

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """Donates `carry`. One token of every row."""
        ...

    def thrown_away(self) -> int:
        """Tokens run before they were asked for, and then not used, since the last call of this."""
        ...

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int, *, frames: Frames | None = None) -> DecodeCarry:
        """A carry over tensors of its own for steps that the caller runs; what it needs beside lives until `end` of its ticket."""
        ...

    def end(self, ticket: int) -> None:
        """Let go of what `begin` set up."""
        ...


@dataclass(slots=True, eq=False)
class Runtime:
    """The opaque part of an `EngineState`: the lease on its memory, and the executor with what cannot be a value.

    `cuts`: by which the executor's kernels cut their work; None: by their defaults, or there are none.
    """

    lease: Lease
    executor: Executor
    cuts: Cuts | None = None


class EagerExecutor:
    """Steps as plain function calls, as on a CPU."""

    def __init__(self, page_size: int, num_pages: int, forward: Forward = models.forward, cascades: Cascades | None = None):
        """`forward` may be what `compiled_forward` returns; `cascades` read shared pages once."""
        self._layout = {"page_size": page_size, "dummy_page": num_pages}
        self._forward, self._cascades = forward, cascades
        self._plan: CascadePlan | None = None  # of the last carry; a session's lives until its end
        self._sessions: dict[int, CascadePlan | None] = {}

    def prefill(
        self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], *, draw: bool = True, frames: Frames | None = None
    ) -> tuple[Drawn | None, KVState]:
        """See `Executor`."""
        host = prefill_batch(rows, draw=draw, frames=frames, **self._layout)
        plan = 0 if self._cascades is None else self._cascades.prompts(host)
        batch = to_device(host, model.device, plan, plan)
        logits, kv = self._forward(model.params, kv, batch, model.config)
        return draw_first(logits, rows, model) if draw else None, kv

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`."""
        host = decode_batch(rows, frames=frames, **self._layout)
        return decode_carry(model, kv, rows, host, self._follow(host))

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`."""
        host = decode_batch(rows, frames=frames, **self._layout)
        plan = self._follow(host)
        return replace(carry, batch=to_device(host, carry.active.device, plan, plan))

    def narrow(
        self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, frames: Frames | None = None
    ) -> DecodeCarry:
        """See `Executor`."""
        return self.load(model, carry.kv, rows, frames=frames)

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """See `Executor`."""
        carry, out = decode_step(model.params, carry, model.config, forward=self._forward)
        return carry, to_host(out)

    def thrown_away(self) -> int:
        """See `Executor`. Nothing runs ahead here."""
        return 0

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int, *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`."""
        loaded, carry = self._plan, self.load(model, kv, rows, frames=frames)
        self._sessions[ticket], self._plan = self._plan, loaded
        return carry

    def end(self, ticket: int) -> None:
        """See `Executor`."""
        self._sessions.pop(ticket, None)

    def _follow(self, host: HostBatch) -> int:
        """The handle of a plan for what the rows share; 0 where they read their pages by themselves."""
        self._plan = None if self._cascades is None else self._cascades.decode(host)
        return 0 if self._plan is None else self._plan.handle


def compiled_layer(model: Model) -> LayerFunction:
    """The model's layer as one compiled function, which serves all layers and every number of tokens."""
    # The tracer counts compilations by code object: one of its own, so that engines do not use each other's limit up.
    original = model.spec.layer
    own = FunctionType(original.__code__.replace(), original.__globals__, original.__name__, original.__defaults__)
    return torch.compile(own, fullgraph=True)


def compiled_forward(model: Model) -> Forward:
    """The model's forward over what `compiled_layer` returns.

    A prompt's chunk of one token runs uncompiled: it is rare, and would need a compilation of its own.
    """
    compiled = compiled_layer(model)

    def layer(w: Any, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        if index < 2:  # what is not marked varies later at the price of one more compilation
            _mark_dynamic(x, cos, sin, batch)
        return compiled(w, x, pages, index, cos, sin, batch, config)

    def forward(params: Any, kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState]:
        whole = batch.cu_seqlens is None or batch.input_ids.shape[0] > 1
        with torch._dynamo.config.patch(recompile_limit=COMPILES):
            return models.forward(params, kv, batch, config, layer=layer if whole else model.spec.layer)

    return forward


def _mark_dynamic(x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> None:
    for tensor in (x, cos, sin, batch.slots, batch.page_tables, batch.seq_lens, batch.cu_seqlens):
        if tensor is not None and tensor.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    if batch.page_tables.shape[1] > 1:
        torch._dynamo.maybe_mark_dynamic(batch.page_tables, 1)


def fused_forward(model: Model, choice: FastChoice | None, cuts: Cuts | None = None) -> Forward:
    """The forward of `models/fused.py`, with the layers that `choice` leaves out compiled; None: it leaves none out."""
    forward = with_cuts(models.fused.forward, cuts)
    if choice is None or choice.all_layers:
        return forward if choice is None or choice.head else partial(forward, choice=choice)
    compiled = compiled_layer(model)

    def plain(w: Any, x: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
        _mark_dynamic(x, cos, sin, batch)
        with torch._dynamo.config.patch(recompile_limit=COMPILES):
            return compiled(w, x, pages, index, cos, sin, batch, config)

    return partial(forward, plain=plain, choice=choice)


def sample_prompts(limits: EngineConfig, shapes: Seq[tuple[int, int]], config: ModelConfig) -> list[HostBatch]:
    """Prompts on the dummy page, each so many rows of so many tokens, as far as there is room for them: what they need is compiled and
    loaded when they run."""
    (dummy, frame), size = dummies(config, limits), limits.page_size
    fitting = [(rows, min(count, limits.max_model_len, limits.max_num_batched_tokens // rows)) for rows, count in shapes]
    return [
        HostBatch(
            input_ids=np.zeros(rows * count, np.int32),
            positions=np.tile(np.arange(count, dtype=np.int32), rows),
            slots=np.full(rows * count, dummy * size, np.int32),
            page_tables=np.full((rows, max(2, pages_for(count, size))), dummy, np.int32),  # one page would be compiled for that alone
            frame_tables=None if frame is None else np.full((rows, max(2, pages_for(count, size))), frame, np.int32),
            frame_slots=None if frame is None else np.full(rows * count, frame * size, np.int32),
            seq_lens=np.full(rows, count, np.int32),
            page_counts=np.full(rows, pages_for(count, size), np.int32),
            cu_seqlens=np.arange(0, (rows + 1) * count, count, dtype=np.int32),
            logit_indices=np.arange(count, rows * count + 1, count, dtype=np.int32) - 1,
        )
        for rows, count in dict.fromkeys(fitting)
        if count >= 2 and rows <= limits.max_num_seqs
    ]


def decode_carry(
    model: Model, kv: KVState, rows: Seq[Sequence], host: HostBatch, plan: int = 0, windowed_plan: int | None = None
) -> DecodeCarry:
    """A carry over fresh tensors. `windowed_plan`: None where it is the plan for all layers."""
    return DecodeCarry(
        kv=kv,
        batch=to_device(host, model.device, plan, plan if windowed_plan is None else windowed_plan),
        sampling=sampling_of(rows, model),
        active=torch.ones(len(rows), dtype=torch.int32, device=model.device),
    )


def sampling_rows(rows: Seq[Sequence]) -> list[sample.Row]:
    """What `sample.build` needs to know of each sequence: its token ids only where there are penalties."""

    def row(s: Sequence) -> sample.Row:
        params, prompt, drawn = s.request.sampling, sample.NO_IDS, sample.NO_IDS
        if sample.penalises(params):
            prompt, drawn = s.tokens.array(0, s.request.num_prompt), s.tokens.array(s.request.num_prompt)
        return params, s.request.seed, prompt, drawn

    return [row(s) for s in rows]


def sampling_of(rows: Seq[Sequence], model: Model) -> sample.Sampling:
    """The sampling tensors of these sequences as they stand."""
    return sample.build(sampling_rows(rows), model.config.vocab_size, model.device)


def draw_first(logits: Tensor, rows: Seq[tuple[Sequence, int]], model: Model) -> Drawn | None:
    """Draw the first token of the sequences whose last prompt token was run."""
    whole = [s for s, count in rows if count == s.todo]
    if not whole:
        return None
    positions = torch.tensor([s.tokens.length for s in whole], dtype=torch.int32, device=logits.device)
    return to_host(sample.sample(logits, sampling_of(whole, model), positions))


def to_host(out: "DecodeOutput | sample.Sampled") -> Drawn:
    """Wait for a step's results."""

    def fetch(tensor: Tensor | None) -> np.ndarray | None:
        return None if tensor is None else tensor.cpu().numpy()

    return Drawn(
        token_ids=out.token_ids.cpu().numpy(),
        logprobs=fetch(out.logprobs),
        top_ids=fetch(out.top_ids),
        top_logprobs=fetch(out.top_logprobs),
    )
