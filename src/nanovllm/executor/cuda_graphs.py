"""Captured decode steps: CUDA graphs by batch size, way to attend and kind of sampling, made before the first request.

For each size and way there is one graph of the model, which also samples greedily. For each size and other kind of sampling there is one
graph that reads the logits and replaces the tokens. Where ranks exchange their best tokens, greedy sampling has a graph of its own too, so
that they do so once a step. The options of the rows are data of these graphs. Two sorts of steps are captured when
they are first needed: those with a caller's functions between logits and samples, and those that attend in a way that did not exist when
the others were captured, such as by FlashInfer's kernels if these were built since.

The buffers of all graphs are views of one set of buffers, sized for the largest batch. A step moves positions, lengths and slots to the
next token, and feeds the sampled tokens back.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import BrokenInvariantError
from nanovllm.executor.attention_plans import Attention, DecodePlans
from nanovllm.executor.batch import EXTENSION, HostBatch, aligned, padded, reordered
from nanovllm.executor.captured_step import MOVED, CapturedStep, Results, StepKind, Way, moving_tensors, recorded
from nanovllm.executor.cascade_policy import Cascades, own_runs
from nanovllm.executor.decode import advance, decode_step
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.executor import Forward
from nanovllm.executor.row_processing import processors_of, row_processing
from nanovllm.executor.run_ahead import retire
from nanovllm.models.common.batch import Batch, Windowed
from nanovllm.models.common.params import Params
from nanovllm.models.common.sharding import in_parts
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.ops.attention.fused_plan import MEDIUM, PIPELINED, FusedDecodePlan
from nanovllm.ops.sampling.draw_parts import parts_of
from nanovllm.sampling.penalty_tables import PenaltyTables, draw_rows
from nanovllm.sampling.process_logits import LogitsProcessor, tokens_of
from nanovllm.sampling.row_options import KINDS, LINES, TABLED, Kind, Row, pack, row_options
from nanovllm.sampling.sampler import Sampled
from nanovllm.sampling.tensors import Sampling
from nanovllm.state.kv_cache import KVState, pages_for
from nanovllm.state.pool_sizes import dummies
from nanovllm.state.request import Sequence
from nanovllm.types import Int32, Int64, Tensor

KEPT = 4  # sets of a caller's functions whose graphs are kept


class StepGraphs:
    """The captured steps over one set of static buffers. A step is filled in, then replayed."""

    def __init__(
        self,
        model: Model,
        limits: EngineConfig,
        sizes: Seq[int],
        forward: Forward,
        tables: PenaltyTables,
        attention: Attention | None,
        cascades: Cascades | None,
        *,
        fused: bool,
        cuts: Cuts | None = None,
        warm: Params[Tensor],
    ):
        """Allocate the static buffers. One of `attention` and `cascades` may be None.

        Args:
            model: The model to run.
            limits: The engine's limits.
            sizes: The batch sizes, ascending.
            forward: The model function.
            tables: The tables of penalties and biases.
            attention: FlashInfer's plans.
            cascades: Plans that read shared pages once, for batches that share enough.
            fused: Whether `forward` takes a `FusedDecodePlan`. Then no row may read KV that another row writes in the same step.
            cuts: The tile configurations of the fused plans. None: the defaults.
            warm: The weights for the run before a step is recorded. They need enough layers to load every kernel.
        """
        self.sizes, self._model, self._forward = tuple(sizes), model, forward  # graphs read the model's weights in place
        self._config = in_parts(model.config)  # ranks keep their parts of the logits, and gather them in steps that need the whole
        dummy_page, dummy_frame = dummies(model.config, limits)
        self._layout = {"page_size": limits.page_size, "dummy_page": dummy_page}
        if dummy_frame is not None:
            self._layout["dummy_frame"] = dummy_frame
        self._width = pages_for(limits.max_model_len, limits.page_size)
        self._longest = limits.max_model_len
        self._seen = model.config.widest_window if model.config.all_windowed else limits.max_model_len  # the most tokens that a row reads
        self._device, self._attention, self._cascades = model.device, attention, cascades
        self._moved = MOVED if dummy_frame is None else (*MOVED, "frame_slots")
        # Besides what a step moves, for each row: whether it is active, the newest token that its slot has not counted, its options.
        self._num_lines = len(self._moved) + 2
        self._ints = torch.zeros((self._num_lines + LINES) * aligned(max(sizes)), dtype=torch.int32, device=self._device)
        self._page_tables = [
            torch.full((max(sizes), self._width), dummy, dtype=torch.int32, device=self._device)
            for dummy in (dummy_page, dummy_frame)
            if dummy is not None
        ]  # of pages, and of frames if there is a second KV pool
        self._fp8 = limits.kv_dtype is not None
        self._width_used = 0  # columns of the page tables: beyond them all rows have the dummy page
        self._decode_plans: dict[int, DecodePlans] = {}
        self._cascade_plans: dict[int, CascadePlan] = {}
        self._fused, self._cuts, self._warm = fused, cuts, warm
        self._fused_plans: dict[int, FusedDecodePlan] = {}
        self._long_plans: dict[int, FusedDecodePlan] = {}
        self._steps: dict[StepKind, CapturedStep] = {}
        self._sampling, self._results = tables, Results.of(max(sizes), model.config.vocab_size, self._device)
        self._token_ids: Tensor | None = None
        self.width = limits.max_model_len + 1  # of the table of tokens that processors read
        self._recent: list[tuple[LogitsProcessor, ...]] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # one for all: memory cached for a stream serves no other

    def free(self) -> None:
        """Free all graphs. None is replayed afterwards."""
        for step in self._steps.values():
            for graph in step.graphs:
                graph.reset()

    def load(self, kv: KVState, host: HostBatch, drawing: Seq[Row], sampling: Kind, processed: Seq[Sequence] = ()) -> CapturedStep:
        """Return a step that is ready to be replayed over these rows, captured now if a caller's function or its way to attend is new.

        `drawing` are the rows that `pack` takes; greedy steps do not read them. `processed` are the sequences of the rows if some of them
        have a function between logits and samples.
        """
        rows = len(host.input_ids)
        size = self.size(rows)
        host = padded(host, size, **self._layout)
        kind = StepKind(size=size, way=self._follow(host), sampling=sampling, processors=processors_of(processed))
        while kind not in self._steps:
            self.capture(
                kv, size, (kind.way,), kind.processors, (sampling,)
            )  # makes another plan; FlashInfer's kernels may arrive meanwhile
            kind = replace(kind, way=self._follow(host))
        step = self._steps[kind]
        self._fill(step.carry, host, rows, None if sampling == "greedy" else drawing)
        if kind.processors:
            self._note_use(kind.processors)
            self._fill_processing(step.carry, processed)
        return step

    def refresh(self, step: CapturedStep, host: HostBatch) -> bool:
        """Fill in the rows of a loaded step again, since their pages may have changed. Returns False if they must be loaded again."""
        rows, kind = len(host.input_ids), step.kind
        host = padded(host, kind.size, **self._layout)
        if self._follow(host) != kind.way:
            return False
        self._fill(step.carry, host, rows)
        return True

    def add_pages(self, step: CapturedStep, host: HostBatch, places: Int64[np.ndarray, "B"]) -> bool:
        """Fill in the pages of a loaded step's rows, which are at `places` of its batch, and nothing else. A step may be running.

        Returns False if the rows must be loaded again, because they attend in another way than before.
        """
        size = step.kind.size
        order = np.argsort(np.concatenate((places, np.delete(np.arange(size), places))))
        host = reordered(padded(host, size, **self._layout), order)
        if self._follow(host) != step.kind.way:  # a plan is updated behind the running step
            return False
        self._fill_tables(step.carry, [host.page_tables], self._pinned(host.page_tables.size))
        return True

    def retire(self, step: CapturedStep, places: Int64[np.ndarray, "gone"]) -> None:
        """Turn some rows of a loaded step into padding. The step must share no pages."""
        retire(step.carry.kv, step.carry.batch, step.carry.active, places)

    def size(self, rows: int) -> int:
        """The number of rows of the smallest graph that holds `rows`."""
        return next(size for size in self.sizes if size >= rows)

    def ways(self, size: int) -> list[Way]:
        """The ways to attend that batches of this size can need, the usual one first."""
        ways: list[Way] = [self.way()]
        if self._fused:
            longest = np.full(size, self._seen)
            one = np.where(np.arange(size) == 0, self._seen, 1)
            if not (self._fused_plan(size).serves(longest) and self._fused_plan(size).serves(one)):
                ways.append("planned" if self._plans_alone() else "long" if self._serves_long(size) else "shared")
        if self._cascades is not None and "shared" not in ways and self._cascades.policy.may_share(size, self._longest):
            ways.append("shared")
        return ways

    def capture(
        self, kv: KVState, size: int, ways: Seq[Way], processors: tuple[LogitsProcessor, ...] = (), kinds: Seq[Kind] = KINDS
    ) -> None:
        """Run the steps of one size on a side stream, then record them. All rows are padding, so only the dummy page is written.

        Overwrites the buffers, and the plans of the size. The graphs of sampling are the same for all ways, because all ways leave their
        logits in the memory of the first one's. It must not be used by another graph of this size. Afterwards graphs of other sizes use
        it, since only one step runs at a time.
        """
        here, logits = torch.cuda.current_stream(self._device), None
        drawing: dict[Kind, tuple[torch.cuda.CUDAGraph, ...]] = {}
        on = self._pool, self._stream
        for way in ways:
            carry = self._padding(kv, size, way, processors)
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                tried = self._run(carry, self._warm)
                for sampling in kinds if logits is None else ():
                    self._draw(carry, tried, sampling)
                del tried
            here.wait_stream(self._stream)
            model, found = recorded(*on, lambda carry=carry, into=logits: self._run(carry, self._model.params, into))
            if logits is None:
                logits = found
                for sampling in kinds:
                    drawing[sampling] = ()
                    if sampling != "greedy" or self._draws_apart(carry):
                        graph, _ = recorded(*on, lambda carry=carry, logits=found, how=sampling: self._draw(carry, logits, how))
                        drawing[sampling] = (graph,)
            for sampling in kinds:
                kind = StepKind(size=size, way=way, sampling=sampling, processors=processors)
                self._steps[kind] = CapturedStep(kind=kind, graphs=(model, *drawing[sampling]), carry=carry, results=self._results)

    def _padding(self, kv: KVState, size: int, way: Way, processors: tuple[LogitsProcessor, ...]) -> DecodeCarry:
        """The carry of a size and a way, filled with rows of padding. Their plan is made, too."""
        dummy, page_size = self._layout["dummy_page"], self._layout["page_size"]
        frame = self._layout.get("dummy_frame")
        nothing = HostBatch(
            input_ids=np.zeros(size, np.int32),
            positions=np.zeros(size, np.int32),
            slots=np.full(size, dummy * page_size, np.int32),
            page_tables=np.full((size, 1), dummy, np.int32),
            seq_lens=np.ones(size, np.int32),
            page_counts=np.ones(size, np.int32),
            frame_tables=None if frame is None else np.full((size, 1), frame, np.int32),
            frame_slots=None if frame is None else np.full(size, frame * page_size, np.int32),
        )
        match way:
            case "shared":
                self._cascade_plan(size).update(own_runs(nothing.page_counts))
            case "planned":
                self._decode_plan(size).update(nothing)
            case "fused" | "long":
                pass
        carry = self._carry(kv, size, way, processors)
        self._fill(carry, nothing, 0, ())
        return carry

    def way(self) -> Way:
        """The way to attend for rows that share nothing and are not long."""
        return "fused" if self._fused else "shared" if self._attention is None else "planned"

    def _plans_alone(self) -> bool:
        """Whether FlashInfer's plans serve long rows that share nothing: not without it, and not before its kernels are built."""
        return self._attention is not None and (self._cascades is None or self._attention.ready())

    def rehearse(self, kv: KVState, size: int) -> None:
        """Run the model by our own kernels, and sample, as `capture` does, but record nothing. Results are not used, not even as tokens.

        They may be garbage, so log-probabilities are left out, which look sampled tokens up. They need no other kernels.
        """
        for way in self.ways(size):
            if way != "planned":
                carry = self._padding(kv, size, way, ())
                logits, _ = self._forward(self._warm, kv, carry.batch, self._config)
                lines, lengths = self._lines(size), carry.batch.seq_lens - 1
                options, newest = row_options(lines[self._num_lines :], size), lines[self._num_lines - 1, :size]
                for sampling in KINDS:
                    if sampling != "logprobs":
                        draw_rows(sampling, logits, options, self._sampling, newest, lengths, parts_of(self._config))

    def _follow(self, host: HostBatch) -> Way:
        """Make the plan for a padded batch, and return its way to attend."""
        size = len(host.input_ids)
        runs = None if self._cascades is None else self._cascades.policy.decode(host)
        if runs is not None and self._cascade_plan(size).update(runs):
            return "shared"
        if (way := self._fused_way(np.minimum(host.seq_lens, self._seen))) is not None:
            return way
        if not self._plans_alone():
            if not self._cascade_plan(size).update(own_runs(host.page_counts)):
                raise BrokenInvariantError(f"the plan of {size} rows has no room for one run of pages per row")
            return "shared"
        self._decode_plan(size).update(host)
        return "planned"

    def _note_use(self, processors: tuple[LogitsProcessor, ...]) -> None:
        """Free the graphs of the callers' functions that were used least recently."""
        self._recent = [*(known for known in self._recent if known != processors), processors]
        for old in self._recent[:-KEPT]:
            self._steps = {kind: step for kind, step in self._steps.items() if kind.processors != old}
        self._recent = self._recent[-KEPT:]

    def _fill_processing(self, carry: DecodeCarry, rows: Seq[Sequence]) -> None:
        """Copy the tokens of the rows, and what their processors carry, into the static buffers of a carry."""
        assert carry.token_ids is not None
        table = tokens_of([s.tokens.array() for s in rows], max(s.tokens.length for s in rows), self._device).token_ids
        carry.token_ids[: table.shape[0], : table.shape[1]].copy_(table)
        fresh = row_processing(rows, [one.processor for one in carry.processing], self.width, self._device, pad_to=len(carry.active))
        for old, new in zip(pytree.tree_leaves(carry.processing), pytree.tree_leaves(fresh), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)

    def _decode_plan(self, size: int) -> DecodePlans:
        assert self._attention is not None
        if size not in self._decode_plans:
            self._decode_plans[size] = self._attention.decode_plans(size)
        return self._decode_plans[size]

    def _cascade_plan(self, size: int) -> CascadePlan:
        assert self._cascades is not None
        if size not in self._cascade_plans:
            self._cascade_plans[size] = self._cascades.plan(size)
        return self._cascade_plans[size]

    def _fused_plan(self, size: int) -> FusedDecodePlan:
        if size not in self._fused_plans:
            # Cuts of attention are measured over KV in the dtype of the model.
            c, cut = self._model.config, () if self._cuts is None or self._fp8 else self._cuts.at(size).attend
            self._fused_plans[size] = FusedDecodePlan(size, c.num_heads, c.num_kv_heads, c.head_dim, self._device, cut, fp8=self._fp8)
        return self._fused_plans[size]

    def _serves_long(self, size: int) -> bool:
        """Whether a fused plan serves so many rows of any lengths, too."""
        return self._fused and not self._fp8 and size <= PIPELINED

    def _fused_way(self, lens: Int32[np.ndarray, "B"]) -> Way | None:
        """The way to attend of rows that share nothing and read so many tokens, if it is by a fused plan."""
        if self._fused and self._fused_plan(len(lens)).serves(lens):
            return "fused"
        if self._plans_alone() or not self._serves_long(len(lens)):
            return None
        return "long" if (lens > MEDIUM).any() else "fused"

    def _long_plan(self, size: int) -> FusedDecodePlan:
        if size not in self._long_plans:
            c = self._model.config
            self._long_plans[size] = FusedDecodePlan(size, c.num_heads, c.num_kv_heads, c.head_dim, self._device, long=True)
        return self._long_plans[size]

    def fused_handle(self, host: HostBatch) -> int | None:
        """The fused plan of a session, which serves its rows until they have filled all their pages: 0 for that of `forward`, or a handle.

        None: no fused plan serves them. Makes the plan of their number.
        """
        most = np.minimum(host.page_counts * self._layout["page_size"], self._seen)
        way = self._fused_way(most)
        return self._long_plan(len(most)).handle if way == "long" else None if way is None else 0

    def forward(self, params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState]:
        """Donates `kv`. Run the rows of a session. Without a plan in the batch they take the fused plan of their number."""
        if self._fused and not batch.plan and batch.cu_seqlens is None:
            plan = self._fused_plan(batch.input_ids.shape[0]).handle
            windowed = None if batch.windowed is None else replace(batch.windowed, plan=plan)
            batch = replace(batch, plan=plan, windowed=windowed)
        return self._forward(params, kv, batch, config)

    def _lines(self, size: int) -> Tensor:
        """The memory of the numbers of each row, for batches of `size` rows: one line per number, of whole 16 bytes. The last ones are the
        rows' options."""
        return self._ints[: (self._num_lines + LINES) * aligned(size)].view(-1, aligned(size))

    def _fill(self, carry: DecodeCarry, host: HostBatch, rows: int, drawing: Seq[Row] | None = None) -> None:
        """Copy a padded batch, of which the first `rows` are in use, into the static buffers of a carry; with `drawing` also options."""
        size, lines = len(host.input_ids), self._lines(len(host.input_ids))
        lines = lines[: self._num_lines] if drawing is None else lines
        given = [table for table in (host.page_tables, host.frame_tables) if table is not None]
        fresh = self._pinned(lines.numel() + sum(table.size for table in given))
        new_lines = fresh[: lines.numel()].view_as(lines)
        *moved, active, newest = new_lines.numpy()[: self._num_lines]
        for line, name in zip(moved, self._moved, strict=True):
            line[:size] = getattr(host, name)
        active[:rows], active[rows:] = 1, 0
        newest[:size] = host.input_ids
        if drawing is not None:
            pack(drawing, new_lines.numpy()[self._num_lines :])
        lines.copy_(new_lines, non_blocking=True)
        self._fill_tables(carry, given, fresh[lines.numel() :])

    def _pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def _fill_tables(self, carry: DecodeCarry, given: list[np.ndarray], fresh: Tensor) -> None:
        """Copy the tables of pages, and of frames, through `fresh` into the static buffers of a carry."""
        (size, width), views = given[0].shape, (carry.batch, carry.batch.windowed)
        new_tables = fresh.view(-1, size, width)
        for new, table in zip(new_tables.numpy(), given, strict=True):
            new[:] = table
        for new, view, name in zip(new_tables, views, ("dummy_page", "dummy_frame"), strict=False):
            assert view is not None
            view.page_tables[:, :width].copy_(new, non_blocking=True)
            view.page_tables[:, width : self._width_used].fill_(self._layout[name])
        self._width_used = max(self._width_used, width)

    def _carry(self, kv: KVState, size: int, way: Way, processors: tuple[LogitsProcessor, ...]) -> DecodeCarry:
        plans = {"fused": self._fused_plan, "long": self._long_plan, "planned": self._decode_plan, "shared": self._cascade_plan}
        lines = self._lines(size)
        *moved, active, _ = lines[: self._num_lines, :size]
        made, windowed = plans[way](size), None
        first, second = made.handles if isinstance(made, DecodePlans) else (made.handle, made.handle)
        if len(self._page_tables) == 2:
            windowed = Windowed(page_tables=self._page_tables[1][:size], slots=moved.pop(), plan=second)
        return DecodeCarry(
            kv=kv,
            batch=Batch(**dict(zip(MOVED, moved, strict=True)), page_tables=self._page_tables[0][:size], plan=first, windowed=windowed),
            sampling=Sampling(seeds=row_options(lines[self._num_lines :], size).seeds),
            active=active,
            processing=row_processing([], processors, self.width, self._device, pad_to=size),
            token_ids=self._tokens()[:size] if processors else None,
        )

    def _tokens(self) -> Tensor:
        """The memory for the tokens of all rows, which steps with processors read. Most engines never need it."""
        if self._token_ids is None:
            shape = self.sizes[-1], self.width
            self._token_ids = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._token_ids

    def _run(self, carry: DecodeCarry, params: Params[Tensor], into: Tensor | None = None) -> Tensor:
        """Run one greedy decode step, and write the changed tensors back into the carry's memory. Returns the logits, copied to `into`."""
        if self._draws_apart(carry):  # the tokens stay as they are until `_draw` replaces them
            logits, kv = self._forward(params, carry.kv, carry.batch, self._config)
            after = advance(carry, kv, Sampled(token_ids=carry.batch.input_ids))
        else:
            after, out = decode_step(params, carry, self._config, forward=self._forward)
            logits = out.logits
        torch._foreach_copy_(moving_tensors(carry), moving_tensors(after))  # pyright: ignore[reportPrivateImportUsage]
        return logits if into is None else into.copy_(logits)

    def _draws_apart(self, carry: DecodeCarry) -> bool:
        """Whether greedy sampling is not part of the model's graph, because ranks would exchange tokens that another kind replaces."""
        return parts_of(self._config) is not None and not carry.processing

    def _draw(self, carry: DecodeCarry, logits: Tensor, sampling: Kind) -> None:
        """Sample from the logits of a step that has run, and replace its tokens."""
        if sampling == "greedy" and not self._draws_apart(carry):
            return
        batch, size = carry.batch, len(carry.active)
        lines = self._lines(size)
        newest, lengths = lines[self._num_lines - 1, :size], batch.seq_lens - 1  # the step has moved on by one token
        parts = None if carry.processing else parts_of(self._config)  # processors have got the logits of all tokens
        options = row_options(lines[self._num_lines :], size)
        sampled = draw_rows(sampling, logits, options, self._sampling, newest, lengths, parts)
        targets = [batch.input_ids, newest] if sampling in TABLED else [batch.input_ids]
        torch._foreach_copy_(targets, [sampled.token_ids] * len(targets))  # pyright: ignore[reportPrivateImportUsage]
        if carry.token_ids is not None:
            last = lengths.long().unsqueeze(1).clamp(max=carry.token_ids.shape[1] - 1)
            carry.token_ids.scatter_(1, last, sampled.token_ids.unsqueeze(1))
        if sampling == "logprobs":
            for name in ("logprobs", "top_ids", "top_logprobs"):
                getattr(self._results, name)[:size].copy_(getattr(sampled, name))


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that get a graph: 1, 2, 4, 8 and 16, then in steps of 16 to 64, of 32 to 128, and of 64.

    A step reads all weights whatever its rows, and tensor cores multiply 16 rows and more at once. So rows of padding cost little, while
    each size makes the start of an engine longer.
    """
    sizes = [1, 2, 4, 8, *range(16, 65, 16), 96, 128, *range(192, max_num_seqs + 64, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def extension_sizes(most: int) -> list[int]:
    """The numbers of prompt tokens that get a graph."""
    sizes = [1, *(1 << power for power in range(3, EXTENSION.bit_length()))]
    return [size for size in sizes if size < most] + [most] * (most <= EXTENSION)
