"""`GraphExecutor`: decode steps as CUDA graphs, one for each batch size of a set and each set of sampling features.

The static buffers of all graphs are views of one set, sized for the largest batch. A step is: host arrays into the buffers (only where
the rows or their pages changed), replay, tokens fetched. The graph itself moves positions, lengths and slots on and feeds the drawn
tokens back, so steps over the same rows need nothing from the host.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from . import sample
from .attention_plans import Attention
from .batch import Batch, HostBatch, decode_batch, prefill_batch, to_device
from .compile import Drawn, compiled_forward, decode_carry, draw_first, sampling_rows, to_host
from .config import EngineConfig
from .decode import DecodeCarry, DecodeOutput, decode_step
from .errors import InvalidRequestError
from .model import Model
from .ops.flashinfer import DecodePlan
from .sampling_params import from_generation_config
from .state.kv import KVState, pages_for
from .state.request import Sequence
from .types import Tensor

P = ParamSpec("P")
R = TypeVar("R")
GREEDY = sample.Features()
RARE_FEATURES = 4  # sets of sampling features, beside the usual ones, whose graphs are kept
SPARE_PLANS = 8  # attention plans of ended sessions that are kept for later ones


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedStep:
    """A graph, the carry whose memory it reads and writes, and the memory of its results."""

    graph: torch.cuda.CUDAGraph
    carry: DecodeCarry
    out: DecodeOutput


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that get a graph: 1, 2, 4, 8, then every eighth to 64, every sixteenth to 256, every 32nd beyond."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def _on_device(method: Callable[Concatenate["GraphExecutor", P], R]) -> Callable[Concatenate["GraphExecutor", P], R]:
    """Kernels, events and graphs go to the current device: make it the executor's for the call."""

    @wraps(method)
    def call(self: "GraphExecutor", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(self._device):
            return method(self, *args, **kwargs)

    return call


class GraphExecutor:
    """See `compile.Executor`. Holds what cannot be a value: compiled functions, graphs, static buffers, attention plans."""

    def __init__(self, model: Model, limits: EngineConfig, kv: KVState, *, progress: bool | None = None):
        """Compile, and capture for every batch size steps that are greedy, that only have a temperature, and that have the features of the
        model's own `generation_config`; others are captured when they are first asked for.

        `kv` is the memory that the graphs will read and write; of its contents only the dummy page changes.
        """
        self._limits, self._device = limits, model.device
        self._layout = {"page_size": limits.page_size, "dummy_page": limits.num_pages}
        self._width = pages_for(limits.max_model_len, limits.page_size)
        self._sizes = batch_sizes(limits.max_num_seqs)
        self._forward = compiled_forward(model)
        self._static, self._active = self._buffers()
        self._attention = Attention(model, limits)
        self._plans: dict[int, DecodePlan] = {}
        self._sessions: dict[int, DecodePlan] = {}
        self._spare: list[DecodePlan] = []
        self._model = model  # the graphs read its weights where they lie
        self._steps: dict[tuple[int, sample.Features], CapturedStep] = {}
        self._usual, self._recent = _usual_features(model), []
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._loaded: tuple[CapturedStep, int, int] | None = None  # step, its batch size, rows in use
        self._warm_up(model, kv, progress)

    @_on_device
    def prefill(
        self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], *, draw: bool = True
    ) -> tuple[Drawn | None, KVState]:
        """See `Executor`."""
        host = prefill_batch(rows, draw=draw, **self._layout)
        logits, kv = self._forward(model.params, kv, self._prompt(host), model.config)
        return draw_first(logits, rows, model) if draw else None, kv

    @_on_device
    def load(self, model: Model, kv: KVState, rows: Seq[Sequence]) -> DecodeCarry:
        """See `Executor`. The carry is the static memory of the graph for these rows' number and sampling features."""
        size = next(size for size in self._sizes if size >= len(rows))
        features = sample.features([s.request.sampling for s in rows])
        step = self._steps.get((size, features)) or self._capture(model, kv, size, features)
        self._note_use(features)
        self._fill(rows, size)
        if features != GREEDY:
            drawing = sample.build(sampling_rows(rows), model.config.vocab_size, self._device, pad_to=size, on=features)
            sample.copy_into(step.carry.sampling, drawing)
        self._loaded = (step, size, len(rows))
        return step.carry

    @_on_device
    def refresh(self, carry: DecodeCarry, rows: Seq[Sequence]) -> DecodeCarry:
        """See `Executor`."""
        step, size, _ = self._current(carry)
        self._fill(rows, size)
        return step.carry

    @_on_device
    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """See `Executor`. One replay; waits for the tokens."""
        step, _, rows = self._current(carry)
        step.graph.replay()
        return step.carry, to_host(step.out, rows)

    @_on_device
    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int) -> DecodeCarry:
        """See `Executor`. The plan covers every page that the rows hold, so that it stays valid for all steps there is room for."""
        host = decode_batch(rows, **self._layout)
        plan = next((p for p in self._spare if p.batch_size == len(rows)), None)
        if plan is None:
            plan = self._attention.decode_plan(len(rows))
        plan.update(host.page_counts, host.page_tables)
        carry = decode_carry(model, kv, rows, host, plan.handle)
        self._spare = [p for p in self._spare if p is not plan]
        self._sessions[ticket] = plan
        return carry

    def end(self, ticket: int) -> None:
        """See `Executor`."""
        plan = self._sessions.pop(ticket, None)
        if plan is not None:
            self._spare = [*self._spare[-(SPARE_PLANS - 1) :], plan]

    def _note_use(self, features: sample.Features) -> None:
        """Let the graphs go whose features, of those captured on demand, were asked for longest ago."""
        self._recent = [f for f in self._recent if f != features] + ([] if features in self._usual else [features])
        for old in self._recent[:-RARE_FEATURES]:
            self._steps = {key: step for key, step in self._steps.items() if key[1] != old}
        self._recent = self._recent[-RARE_FEATURES:]

    def _prompt(self, host: HostBatch) -> Batch:
        return to_device(host, self._device, self._attention.plan_prompt(host))

    def _current(self, carry: DecodeCarry) -> tuple[CapturedStep, int, int]:
        assert self._loaded is not None and self._loaded[0].carry is carry
        return self._loaded

    def _buffers(self) -> tuple[Batch, Tensor]:
        size, dummy = self._limits.max_num_seqs, self._limits.num_pages

        def ints(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=self._device)

        batch = Batch(
            input_ids=ints(size),
            positions=ints(size),
            slots=ints(size, value=dummy * self._limits.page_size),
            page_tables=ints(size, self._width, value=dummy),
            seq_lens=ints(size, value=1),
        )
        return batch, ints(size)

    def _fill(self, rows: Seq[Sequence], size: int) -> None:
        """The host's view of the rows into the static buffers and the attention plan; padding rows stand on the dummy page."""
        host = _padded(decode_batch(rows, **self._layout), size, self._limits.num_pages, self._limits.page_size)
        fresh, static, width = to_device(host, self._device), self._static, host.page_tables.shape[1]
        for name in ("input_ids", "positions", "slots", "seq_lens"):
            getattr(static, name)[:size].copy_(getattr(fresh, name))
        static.page_tables[:size, :width].copy_(fresh.page_tables)
        static.page_tables[:size, width:].fill_(self._limits.num_pages)
        self._active[: len(rows)].fill_(1)
        self._active[len(rows) : size].fill_(0)
        self._plans[size].update(host.page_counts, host.page_tables)

    def _carry(self, model: Model, kv: KVState, size: int, features: sample.Features) -> DecodeCarry:
        batch = self._static
        return DecodeCarry(
            kv=kv,
            batch=Batch(
                input_ids=batch.input_ids[:size],
                positions=batch.positions[:size],
                slots=batch.slots[:size],
                page_tables=batch.page_tables[:size],
                seq_lens=batch.seq_lens[:size],
                plan=self._plans[size].handle,
            ),
            sampling=sample.build([], model.config.vocab_size, self._device, pad_to=size, on=features),
            active=self._active[:size],
        )

    def _step(self, model: Model, carry: DecodeCarry) -> DecodeOutput:
        """One decode step that writes what changed back into the carry's own memory."""
        after, out = decode_step(model.params, carry, model.config, forward=self._forward)
        for name in ("input_ids", "positions", "slots", "seq_lens"):
            getattr(carry.batch, name).copy_(getattr(after.batch, name))
        return replace(out, logits=out.logits[:0])

    def _capture(self, model: Model, kv: KVState, size: int, features: sample.Features) -> CapturedStep:
        """Warm the step up on a side stream, then record it. The rows in use are padding, so only the dummy page is written."""
        if size not in self._plans:
            self._plans[size] = self._attention.decode_plan(size)
        self._fill([], size)
        carry = self._carry(model, kv, size, features)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._step(model, carry)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream):
            out = self._step(model, carry)
        self._steps[size, features] = CapturedStep(graph=graph, carry=carry, out=out)
        self._loaded = None
        return self._steps[size, features]

    @torch.no_grad()
    def _warm_up(self, model: Model, kv: KVState, progress: bool | None) -> None:
        dummy, size = self._limits.num_pages, self._limits.page_size
        count = min(16, self._limits.max_num_batched_tokens, self._limits.max_model_len)
        host = HostBatch(
            input_ids=np.zeros(count, np.int32),
            positions=np.arange(count, dtype=np.int32),
            slots=np.full(count, dummy * size, np.int32),
            page_tables=np.full((1, pages_for(count, size)), dummy, np.int32),
            seq_lens=np.array([count], np.int32),
            page_counts=np.array([pages_for(count, size)], np.int32),
            cu_seqlens=np.array([0, count], np.int32),
            logit_indices=np.array([count - 1], np.int32),
        )
        # None: tqdm stays quiet where stderr is not a terminal.
        bar = tqdm(total=1 + len(self._sizes), desc="warm-up", unit="graph", disable=None if progress is None else not progress)
        with bar:
            self._forward(model.params, kv, self._prompt(host), model.config)
            bar.update()
            for batch_size in reversed(self._sizes):  # the largest first: the others find its memory in the pool
                bar.set_postfix_str(f"batch {batch_size}")
                for features in self._usual:
                    self._capture(model, kv, batch_size, features)
                bar.update()
        torch.cuda.synchronize(self._device)


def _usual_features(model: Model) -> dict[sample.Features, None]:
    usual = dict.fromkeys((GREEDY, sample.Features(temperature=True)))
    with suppress(InvalidRequestError):  # a generation_config that SamplingParams refuse concerns those who ask for it
        usual[sample.features([from_generation_config(model.generation_config)])] = None
    return usual


def _padded(host: HostBatch, size: int, dummy_page: int, page_size: int) -> HostBatch:
    extra = size - len(host.input_ids)

    def pad(array: np.ndarray, value: int) -> np.ndarray:
        widths = [(0, extra)] + [(0, 0)] * (array.ndim - 1)
        return np.pad(array, widths, constant_values=value)

    return HostBatch(
        input_ids=pad(host.input_ids, 0),
        positions=pad(host.positions, 0),
        slots=pad(host.slots, dummy_page * page_size),
        page_tables=pad(host.page_tables, dummy_page),
        seq_lens=pad(host.seq_lens, 1),
        page_counts=pad(host.page_counts, 1),
    )
