"""`GraphExecutor`: decode steps as CUDA graphs, one for each batch size of a set and each set of sampling features.

The static buffers of all graphs are views of one set, sized for the largest batch. A step is: host arrays into the buffers (only where
the rows or their pages changed), replay, tokens fetched. The graph itself moves positions, lengths and slots on and feeds the drawn
tokens back, so steps over the same rows need nothing from the host.
"""

import warnings
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from . import sample
from .batch import Batch, HostBatch, decode_batch, prefill_batch, to_device
from .compile import Drawn, compiled_forward, decode_carry, draw_first, sampling_rows, to_host
from .config import EngineConfig
from .decode import DecodeCarry, DecodeOutput, decode_step
from .model import Model
from .ops.flashinfer import AttentionWorkspace, DecodePlan, PrefillPlan, attention_backend
from .sampling_params import from_generation_config
from .state.kv import KVState, pages_for
from .state.request import Sequence
from .types import Tensor

GREEDY = sample.Features()


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """A graph, the carry whose memory it reads and writes, and the memory of its results."""

    graph: torch.cuda.CUDAGraph
    carry: DecodeCarry
    out: DecodeOutput


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that get a graph: 1, 2, 4, 8, then every eighth to 64, every sixteenth to 256, every 32nd beyond."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class Attention:
    """The attention plans of one engine: FlashInfer's, or none where it cannot serve the model and the ops' plain torch form does."""

    def __init__(self, model: Model, limits: EngineConfig):
        c = model.config
        self._shape = (
            pages_for(limits.max_model_len, limits.page_size), c.num_heads, c.num_kv_heads, c.head_dim, limits.page_size, model.dtype,
            model.device,
        )  # fmt: skip
        self._workspace, self._prompt = None, None
        if attention_backend(model.device, model.dtype, c.head_dim, limits.page_size) == "flashinfer":
            self._workspace = AttentionWorkspace(limits.max_num_seqs, c.num_heads, c.num_kv_heads, c.head_dim, model.device)
            self._prompt = PrefillPlan(self._workspace, limits.max_num_seqs, *self._shape)
        else:
            warnings.warn(
                f"FlashInfer cannot serve {model.dtype} with head_dim={c.head_dim} on this machine; attention runs in plain torch, slowly",
                stacklevel=2,
            )

    def decode_plan(self, size: int) -> DecodePlan | None:
        """A plan of its own for decode batches of `size` rows."""
        return None if self._workspace is None else DecodePlan(self._workspace, size, *self._shape)

    def plan_prompt(self, host: HostBatch) -> int:
        """The handle for a batch of prompts."""
        if self._prompt is None:
            return 0
        assert host.cu_seqlens is not None
        self._prompt.update(host.cu_seqlens, host.seq_lens, host.page_tables)
        return self._prompt.handle


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
        self._plans: dict[int, DecodePlan | None] = {}
        self._sessions: dict[int, tuple[int, DecodePlan | None]] = {}
        self._spare: dict[int, list[DecodePlan | None]] = {}
        self._steps: dict[tuple[int, sample.Features], CapturedStep] = {}
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._loaded: tuple[CapturedStep, int, int] | None = None  # step, its batch size, rows in use
        self._warm_up(model, kv, progress)

    def prefill(
        self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], *, draw: bool = True
    ) -> tuple[Drawn | None, KVState]:
        """See `Executor`."""
        host = prefill_batch(rows, draw=draw, **self._layout)
        logits, kv = self._forward(model.params, kv, self._prompt(host), model.config)
        return draw_first(logits, rows, model) if draw else None, kv

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence]) -> DecodeCarry:
        """See `Executor`. The carry is the static memory of the graph for these rows' number and sampling features."""
        size = next(size for size in self._sizes if size >= len(rows))
        features = sample.features([s.request.sampling for s in rows])
        step = self._steps.get((size, features)) or self._capture(model, kv, size, features)
        self._fill(rows, size)
        if features != GREEDY:
            drawing = sample.build(sampling_rows(rows), model.config.vocab_size, self._device, pad_to=size, on=features)
            sample.copy_into(step.carry.sampling, drawing)
        self._loaded = (step, size, len(rows))
        return step.carry

    def refresh(self, carry: DecodeCarry, rows: Seq[Sequence]) -> DecodeCarry:
        """See `Executor`."""
        step, size, _ = self._current(carry)
        self._fill(rows, size)
        return step.carry

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """See `Executor`. One replay; waits for the tokens."""
        step, _, rows = self._current(carry)
        step.graph.replay()
        return step.carry, to_host(step.out, rows)

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int) -> DecodeCarry:
        """See `Executor`. The plan covers every page that the rows hold, so that it stays valid for all steps there is room for."""
        host = decode_batch(rows, **self._layout)
        spare = self._spare.setdefault(len(rows), [])
        plan = spare.pop() if spare else self._attention.decode_plan(len(rows))
        self._sessions[ticket] = len(rows), plan
        return decode_carry(model, kv, rows, host, _update(plan, host))

    def end(self, ticket: int) -> None:
        """See `Executor`."""
        session = self._sessions.pop(ticket, None)
        if session is not None:
            size, plan = session
            self._spare[size].append(plan)

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
        _update(self._plans[size], host)

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
                plan=_handle(self._plans[size]),
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
        self._steps[size, features] = CapturedStep(graph, carry, out)
        self._loaded = None
        return self._steps[size, features]

    @torch.no_grad()
    def _warm_up(self, model: Model, kv: KVState, progress: bool | None) -> None:
        dummy, size = self._limits.num_pages, self._limits.page_size
        count = min(16, self._limits.max_num_batched_tokens, size)
        host = HostBatch(
            input_ids=np.zeros(count, np.int32),
            positions=np.arange(count, dtype=np.int32),
            slots=np.full(count, dummy * size, np.int32),
            page_tables=np.full((1, 1), dummy, np.int32),
            seq_lens=np.array([count], np.int32),
            page_counts=np.array([1], np.int32),
            cu_seqlens=np.array([0, count], np.int32),
            logit_indices=np.array([count - 1], np.int32),
        )
        own = sample.features([from_generation_config(model.generation_config)])
        usual = dict.fromkeys((GREEDY, sample.Features(temperature=True), own))
        # None: tqdm stays quiet where stderr is not a terminal.
        bar = tqdm(total=1 + len(self._sizes), desc="warm-up", unit="graph", disable=None if progress is None else not progress)
        with bar:
            self._forward(model.params, kv, self._prompt(host), model.config)
            bar.update()
            for batch_size in reversed(self._sizes):  # the largest first: the others find its memory in the pool
                bar.set_postfix_str(f"batch {batch_size}")
                for features in usual:
                    self._capture(model, kv, batch_size, features)
                bar.update()
        torch.cuda.synchronize(self._device)


def _update(plan: DecodePlan | None, host: HostBatch) -> int:
    if plan is not None:
        plan.update(host.page_counts, host.page_tables)
    return _handle(plan)


def _handle(plan: DecodePlan | None) -> int:
    return 0 if plan is None else plan.handle


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
