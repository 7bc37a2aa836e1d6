"""Captured decode steps: one CUDA graph per batch size, set of sampling features and way to attend.

The buffers of all graphs are views of one set of buffers, sized for the largest batch. A graph moves positions, lengths and slots to the
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
from nanovllm.executor.batch import EXTENSION, HostBatch, aligned, padded
from nanovllm.executor.captured_step import MOVED, CapturedStep, StepKind, Way, moving_tensors, pinned_results, recorded
from nanovllm.executor.cascade_policy import Cascades, own_runs
from nanovllm.executor.decode import decode_step
from nanovllm.executor.decode_carry import DecodeCarry, DecodeOutput
from nanovllm.executor.executor import Forward
from nanovllm.executor.row_processing import processors_of, row_processing
from nanovllm.executor.run_ahead import retire
from nanovllm.models.common.batch import Batch, Windowed
from nanovllm.models.common.params import Params
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.sampling import tensors
from nanovllm.sampling.process_logits import LogitsProcessor, tokens_of
from nanovllm.state.kv_cache import KVState, pages_for
from nanovllm.state.pool_sizes import dummies
from nanovllm.state.request import Sequence
from nanovllm.types import Int64, Tensor

GREEDY = tensors.Features()


RARE_FEATURES = 4  # sets of sampling features, apart from the usual ones, whose graphs are kept


class StepGraphs:
    """The captured steps over one set of static buffers. A step is filled in, then replayed."""

    def __init__(
        self,
        model: Model,
        limits: EngineConfig,
        sizes: Seq[int],
        forward: Forward,
        usual: Seq[tensors.Features],
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
            usual: Sampling features whose graphs are kept for good.
            attention: FlashInfer's plans.
            cascades: Plans that read shared pages once, for batches that share enough.
            fused: Whether `forward` takes a `FusedDecodePlan`. Then no row may read KV that another row writes in the same step.
            cuts: The tile configurations of the fused plans. None: the defaults.
            warm: The weights for the run before a step is recorded. They need enough layers to load every kernel.
        """
        self.sizes, self._model, self._forward = tuple(sizes), model, forward  # graphs read the model's weights in place
        dummy_page, dummy_frame = dummies(model.config, limits)
        self._layout = {"page_size": limits.page_size, "dummy_page": dummy_page}
        if dummy_frame is not None:
            self._layout["dummy_frame"] = dummy_frame
        self._width = pages_for(limits.max_model_len, limits.page_size)
        self._seen = model.config.widest_window if model.config.all_windowed else limits.max_model_len  # the most tokens that a row reads
        self._device, self._attention, self._cascades = model.device, attention, cascades
        self._moved = MOVED if dummy_frame is None else (*MOVED, "frame_slots")
        self._ints = torch.zeros((len(self._moved) + 1) * aligned(max(sizes)), dtype=torch.int32, device=self._device)
        self._tables = [
            torch.full((max(sizes), self._width), dummy, dtype=torch.int32, device=self._device)
            for dummy in (dummy_page, dummy_frame)
            if dummy is not None
        ]  # of pages, and of frames if there is a second KV pool
        self._width_used = 0  # columns of the page tables: beyond them all rows have the dummy page
        self._decode_plans: dict[int, DecodePlans] = {}
        self._cascade_plans: dict[int, CascadePlan] = {}
        self._fused, self._cuts, self._warm = fused, cuts, warm
        self._fused_plans: dict[int, FusedDecodePlan] = {}
        self._steps: dict[StepKind, CapturedStep] = {}
        self._token_ids: Tensor | None = None
        self.width = limits.max_model_len + 1  # of the table of tokens that processors read
        self.usual, self._recent = tuple(usual), []
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # one for all: memory cached for a stream serves no other

    def load(
        self,
        kv: KVState,
        host: HostBatch,
        drawing: Seq[tensors.Row],
        features: tensors.Features,
        processed: Seq[Sequence] = (),
    ) -> CapturedStep:
        """Return a step that is ready to be replayed over these rows, captured now if it is new.

        `drawing` are the rows that `tensors.build` takes; greedy `features` do not read them. `processed` are the sequences of the rows if
        some of them have a function between logits and samples.
        """
        rows = len(host.input_ids)
        size = self.size(rows)
        host = padded(host, size, **self._layout)
        kind = StepKind(size=size, features=features, way=self._follow(host), processors=processors_of(processed))
        while kind not in self._steps:
            self.capture(kv, kind)  # makes another plan; FlashInfer's kernels may arrive meanwhile
            kind = replace(kind, way=self._follow(host))
        step = self._steps[kind]
        self._note_use(features, kind.processors)
        self._fill(step.carry, host, rows)
        if features != GREEDY:
            sampling = tensors.build(drawing, self._model.config.vocab_size, self._device, pad_to=size, on=features)
            tensors.copy_into(step.carry.sampling, sampling)
        if kind.processors:
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

    def retire(self, step: CapturedStep, places: Int64[np.ndarray, "gone"]) -> None:
        """Turn some rows of a loaded step into padding. The step must share no pages."""
        retire(step.carry.kv, step.carry.batch, step.carry.active, places)

    def size(self, rows: int) -> int:
        """The number of rows of the smallest graph that holds `rows`."""
        return next(size for size in self.sizes if size >= rows)

    def rehearse(self, kv: KVState, size: int) -> None:
        """Run the model as `capture` does, but record nothing. Nothing is sampled: a token that no kernel has written may be no token."""
        carry = self._padding(kv, StepKind(size=size, features=GREEDY, way=self.way()))
        self._forward(self._warm, kv, carry.batch, self._model.config)

    def _padding(self, kv: KVState, kind: StepKind) -> DecodeCarry:
        """The carry of a step, filled with rows of padding. Overwrites the buffers, and the plans of its size."""
        size, dummy, page_size = kind.size, self._layout["dummy_page"], self._layout["page_size"]
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
        match kind.way:
            case "shared":
                self._cascade_plan(size).update(own_runs(nothing.page_counts))
            case "planned":
                self._decode_plan(size).update(nothing)
            case "fused":
                pass
        carry = self._carry(kv, kind)
        self._fill(carry, nothing, 0)
        return carry

    def capture(self, kv: KVState, kind: StepKind) -> None:
        """Run a step on a side stream, then record it. All its rows are padding, so only the dummy page is written."""
        carry = self._padding(kv, kind)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._run(carry, self._warm)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph, out = recorded(self._pool, self._stream, lambda: self._run(carry, self._model.params))
        self._steps[kind] = CapturedStep(kind=kind, graph=graph, carry=carry, out=out, fetched=pinned_results(out))

    def way(self) -> Way:
        """The way to attend for rows that share nothing and are not long."""
        return "fused" if self._fused else "shared" if self._attention is None else "planned"

    def _follow(self, host: HostBatch) -> Way:
        """Make the plan for a padded batch, and return its way to attend."""
        size = len(host.input_ids)
        runs = None if self._cascades is None else self._cascades.policy.decode(host)
        if runs is not None and self._cascade_plan(size).update(runs):
            return "shared"
        if self._fused and self._fused_plan(size).serves(np.minimum(host.seq_lens, self._seen)):
            return "fused"
        if self._attention is None or (self._cascades is not None and not self._attention.ready()):
            if not self._cascade_plan(size).update(own_runs(host.page_counts)):
                raise BrokenInvariantError(f"the plan of {size} rows has no room for one run of pages per row")
            return "shared"
        self._decode_plan(size).update(host)
        return "planned"

    def _note_use(self, features: tensors.Features, processors: tuple[LogitsProcessor, ...]) -> None:
        """Free the rare graphs whose sampling features and processors were used least recently."""
        used = features, processors
        self._recent = [f for f in self._recent if f != used] + ([] if features in self.usual and not processors else [used])
        for old in self._recent[:-RARE_FEATURES]:
            self._steps = {kind: step for kind, step in self._steps.items() if (kind.features, kind.processors) != old}
        self._recent = self._recent[-RARE_FEATURES:]

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
            c, cut = self._model.config, () if self._cuts is None else self._cuts.at(size).attend
            self._fused_plans[size] = FusedDecodePlan(size, c.num_heads, c.num_kv_heads, c.head_dim, self._device, cut)
        return self._fused_plans[size]

    def fuses(self, host: HostBatch) -> bool:
        """Whether a fused plan serves these rows until they have filled all their pages. Makes the plan of their number."""
        most = np.minimum(host.page_counts * self._layout["page_size"], self._seen)
        return self._fused and self._fused_plan(len(most)).serves(most)

    def forward(self, params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Tensor, KVState]:
        """Donates `kv`. Run the rows of a session. Without a plan in the batch they take the fused plan of their number."""
        if self._fused and not batch.plan and batch.cu_seqlens is None:
            plan = self._fused_plan(batch.input_ids.shape[0]).handle
            windowed = None if batch.windowed is None else replace(batch.windowed, plan=plan)
            batch = replace(batch, plan=plan, windowed=windowed)
        return self._forward(params, kv, batch, config)

    def _lines(self, size: int) -> Tensor:
        """The memory of the tensors with one int per row, for batches of `size` rows: one line per tensor, of whole 16 bytes."""
        return self._ints[: (len(self._moved) + 1) * aligned(size)].view(-1, aligned(size))

    def _fill(self, carry: DecodeCarry, host: HostBatch, rows: int) -> None:
        """Copy a padded batch, of which the first `rows` are in use, into the static buffers of a carry."""
        (size, width), lines = host.page_tables.shape, self._lines(len(host.input_ids))
        given = [table for table in (host.page_tables, host.frame_tables) if table is not None]
        fresh = torch.empty(lines.numel() + len(given) * size * width, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        new_lines, new_tables = fresh[: lines.numel()].view_as(lines), fresh[lines.numel() :].view(-1, size, width)
        *moved, active = new_lines.numpy()
        for line, name in zip(moved, self._moved, strict=True):
            line[:size] = getattr(host, name)
        active[:rows], active[rows:] = 1, 0
        for new, table in zip(new_tables.numpy(), given, strict=True):
            new[:] = table
        lines.copy_(new_lines, non_blocking=True)
        views = (carry.batch, carry.batch.windowed)
        for new, view, name in zip(new_tables, views, ("dummy_page", "dummy_frame"), strict=False):
            assert view is not None
            view.page_tables[:, :width].copy_(new, non_blocking=True)
            view.page_tables[:, width : self._width_used].fill_(self._layout[name])
        self._width_used = max(self._width_used, width)

    def _carry(self, kv: KVState, kind: StepKind) -> DecodeCarry:
        size = kind.size
        plans = {"fused": self._fused_plan, "planned": self._decode_plan, "shared": self._cascade_plan}
        *moved, active = self._lines(size)[:, :size]
        made, windowed = plans[kind.way](size), None
        first, second = made.handles if isinstance(made, DecodePlans) else (made.handle, made.handle)
        if len(self._tables) == 2:
            windowed = Windowed(page_tables=self._tables[1][:size], slots=moved.pop(), plan=second)
        return DecodeCarry(
            kv=kv,
            batch=Batch(**dict(zip(MOVED, moved, strict=True)), page_tables=self._tables[0][:size], plan=first, windowed=windowed),
            sampling=tensors.build([], self._model.config.vocab_size, self._device, pad_to=size, on=kind.features),
            active=active,
            processing=row_processing([], kind.processors, self.width, self._device, pad_to=size),
            token_ids=self._tokens()[:size] if kind.processors else None,
        )

    def _tokens(self) -> Tensor:
        """The memory for the tokens of all rows, which steps with processors read. Most engines never need it."""
        if self._token_ids is None:
            shape = self.sizes[-1], self.width
            self._token_ids = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._token_ids

    def _run(self, carry: DecodeCarry, params: Params[Tensor]) -> DecodeOutput:
        """Run one decode step, and write the changed tensors back into the carry's memory."""
        after, out = decode_step(params, carry, self._model.config, forward=self._forward)
        torch._foreach_copy_(moving_tensors(carry), moving_tensors(after))  # pyright: ignore[reportPrivateImportUsage]
        return replace(out, logits=out.logits.new_empty(0, out.logits.shape[1]))  # a view would keep all logits in memory


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that get a graph: 1, 2, 4 and 8, then in steps of 8 to 64, of 16 to 256, and of 32."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def extension_sizes(most: int) -> list[int]:
    """The numbers of prompt tokens that get a graph."""
    sizes = [1, *(1 << power for power in range(3, EXTENSION.bit_length()))]
    return [size for size in sizes if size < most] + [most] * (most <= EXTENSION)
