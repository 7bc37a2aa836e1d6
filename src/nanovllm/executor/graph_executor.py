"""`GraphExecutor`: decode steps and short prompts as replays of CUDA graphs.

A step copies host arrays into static buffers, replays a graph, and fetches the tokens. Arrays are copied only if the rows or their pages
changed.

Steps over the same rows need nothing from the host. So the next step is launched before the host has seen the tokens of this one, and runs
while the host post-processes them. A row that has ended becomes padding. If rows are added or pages change, the step that runs ahead is
discarded. If rows only get more pages, and the step that runs ahead needs none of them, it stays, and only the page tables are filled in.

The last few tokens of a prompt whose other tokens are filled also run as rows of such a graph. Short prompts have graphs of their own.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.agreed_memory import prepared
from nanovllm.executor.attention_plans import Attention, DecodePlans, PromptPlans, own_plans
from nanovllm.executor.batch import HostBatch, decode_batch, prefill_batch, sample_prompts, to_device, token_rows, widened
from nanovllm.executor.capture import Captured
from nanovllm.executor.captured_step import CapturedStep
from nanovllm.executor.carry import decode_carry, for_a_session
from nanovllm.executor.cascade_policy import Cascades, cascade_policy, own_runs
from nanovllm.executor.compiled import COMPILED_PROMPTS, all_fused, compiled_forward, fused_forward
from nanovllm.executor.cuda_graphs import StepGraphs, batch_sizes, extension_sizes
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.executor import Drawn, Masks
from nanovllm.executor.logits_graphs import LogitsGraphs
from nanovllm.executor.prompt_graphs import PromptGraphs, prompt_kinds
from nanovllm.executor.prompt_halves import cut, least_tokens, middle
from nanovllm.executor.row_processing import carries, kept, processors_of
from nanovllm.executor.row_tables import RowTables
from nanovllm.executor.run_ahead import RunAhead, longest_first, placed
from nanovllm.executor.scoring import Scored, asked_logprobs, score_batch, whole_prompts
from nanovllm.executor.step_program import StepProgram
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params, two_of_each
from nanovllm.models.common.sharding import in_parts
from nanovllm.models.fast import fused, halves
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.ops.compile_ahead import FirstStart
from nanovllm.ops.distributed.collectives import require_ranks
from nanovllm.ops.sampling.draw_parts import parts_of
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.row_options import TABLED, Kind, Row, kind_of, mask_lines, packed_options
from nanovllm.state.kv_cache import KVState
from nanovllm.state.pool_sizes import dummies
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Int64, Tensor

P = ParamSpec("P")
R = TypeVar("R")
NOTHING: Row = (packed_options(SamplingParams(temperature=0)), 0, -1)  # for rows whose result is not used

# Rows and tokens of the prompts that warm kernels up. They cover each tile configuration that decode steps do not use, for token counts
# that are a multiple of 16 and for others: Triton compiles separate kernels for the two.
FUSED_PROMPTS = ((1, 160), (1, 161), (1, 224), (1, 225), (1, 512), (2, 256), (16, 32))
MOST_ROWS, LONG_CONTEXT = 64, 4096  # prompt tokens of a step that are always rows of it, and tokens before them: measured on an H100
SPARE_PLANS = 8  # attention plans of ended sessions, kept for later sessions
CAPTURED = 4  # captured functions of the engine's own sessions, kept for later ones


def _on_device(method: Callable[Concatenate["GraphExecutor", P], R]) -> Callable[Concatenate["GraphExecutor", P], R]:
    """Make the executor's device current for the call, because kernels, events and graphs use the current device."""

    @wraps(method)
    def call(self: "GraphExecutor", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(self._device):
            return method(self, *args, **kwargs)

    return call


class GraphExecutor:
    """An executor that replays CUDA graphs.

    It holds the parts that cannot be values: graphs, static buffers, attention plans, and compiled functions for models that the kernels do
    not serve.

    Attributes:
        halves_from: The fewest tokens of prompts that run as two halves (`models/fast/halves.py`) unless a graph holds them. None:
            prompts run whole, without ranks, or because not all layers are fused. All ranks of a model have the same.
    """

    def __init__(
        self,
        model: Model,
        limits: EngineConfig,
        kv: KVState,
        *,
        cascade: bool | None = None,
        choice: FastChoice | None = None,
        cuts: Cuts | None = None,
        progress: bool | None = None,
        first: FirstStart,
    ):
        """Capture the decode steps of every batch size, way to attend and kind of sampling, and short prompts.

        Captured later are functions of callers, those between logits and samples when a batch first needs them, and `captured`; and steps
        over FlashInfer's kernels if these are built only after the start.

        Args:
            model: The model to run.
            limits: The engine's limits.
            kv: The memory that the graphs will read and write. Of its contents only the dummy page changes.
            cascade: Whether shared pages are read once; see `init_state`.
            choice: The layers that the fused kernels may run. None: all.
            cuts: The tile configurations of the kernels. None: the defaults.
            progress: Whether to show a progress bar. None: only if stderr is a terminal.
            first: Compiles kernels ahead.
        """
        self._device, self._model = model.device, model
        self._config = in_parts(model.config)
        self._layout = {"page_size": limits.page_size, "dummy_page": dummies(model.config, limits)[0]}
        served = fused.serves(model.params, model.config) and (choice is None or any(choice.layers))
        self._forward = fused_forward(model, choice, cuts) if served else compiled_forward(model)
        # If every layer has a sliding window, few tokens see shared pages, and shared pages may have no frames.
        apart = cascade is False or (cascade is None and model.config.all_windowed)
        own = limits.kv_dtype is not None  # then the plans of our own kernels serve long rows too, also if nothing is shared
        policy = None if apart and not own else cascade_policy(model, limits, always=bool(cascade), alone=apart)
        self._cascades = None if policy is None else Cascades(model, limits, policy)
        sizes = batch_sizes(limits.max_num_seqs)
        self._rows = RowTables(limits.max_num_seqs, model.config.vocab_size, model.device, parts_of(self._config))
        tables = self._rows.tables
        # Plain layers cannot follow a fused plan, nor read the new keys and values of prompts from one tensor.
        self._together = all_fused(model, choice)
        self._attention = Attention(model, limits, policy, beside=self._together and policy is not None)
        self.halves_from = least_tokens(model) if self._together else None
        self._in_halves = partial(halves.forward, choice=choice, cuts=cuts)
        warm = two_of_each(model.params) if self._together and not model.config.windows else model.params
        self._decode = StepGraphs(
            model,
            limits,
            sizes,
            self._forward,
            tables,
            None if own else self._attention,
            self._cascades,
            fused=self._together,
            cuts=cuts,
            warm=warm,
        )
        # Tokens of one prompt share nearly all pages that they attend to, even if sequences share none.
        within = None if self._cascades is None else self._cascades.within(replace(self._cascades.policy, always=True))
        sizes = extension_sizes(limits.max_num_batched_tokens)
        attention = self._attention if within is None else None
        self._extend = StepGraphs(model, limits, sizes, self._forward, tables, attention, within, fused=False, warm=warm)
        short = prompt_kinds(model, limits, choice)
        self._short = PromptGraphs(model, limits, short, self._forward, warm=warm) if short else None
        self._logits = LogitsGraphs(model, self._decode.forward)
        self._program = StepProgram(model, self._logits.forward)
        self._sessions: dict[int, DecodePlans | CascadePlan] = {}
        self._spare: list[DecodePlans] = []
        self._prompts: dict[int, PromptPlans] = {}
        self._captured: list[Captured] = []
        self._loaded: tuple[CapturedStep, int] | None = None  # the decode step whose buffers are filled, and its rows in use
        self._mask_lines: list[int] = []  # of the loaded rows, by place; -1: none
        self._ahead = RunAhead(limits.page_size)
        self._warm_up(model, kv, limits, warm, progress, first)

    @_on_device
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
        """Donates `kv`. Run prompt tokens: a few of them as rows of a captured step, more by a graph of prompts, many by one call."""
        if self._extends(rows) and model.params is self._model.params and not processors_of([s for s, _ in rows]):
            return self._extension(kv, rows, draw, frames, masks), kv
        host = prefill_batch(rows, draw=draw, frames=frames, **self._layout)
        logits = None if self._short is None or self._attention.shares(host) else self._short.run(model.params, kv, host)
        if logits is None:
            logits, kv = self._run_prompts(model, kv, host, self._config)
        drawn = self._rows.draw(logits, _whole(rows, draw), self._decode.width, masks)
        require_ranks(model.config.mesh)
        return drawn, kv

    @_on_device
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
        """Donates `kv`. Run prompt tokens as one call of the model, and look the log-probabilities up in its logits."""
        host = score_batch(rows, asked, frames=frames, **self._layout)
        logits, kv = self._run_prompts(model, kv, host, model.config)
        return asked_logprobs(logits, asked, num_top), kv

    @_on_device
    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Fill the static buffers of the graph for these rows, longest first, and return them as the carry."""
        self._require_weights(model)
        self._ahead.drop()
        self._loaded = None
        places = longest_first(rows)
        carried, sampling = placed(rows, places), kind_of([s.request.options for s in rows])
        drawing = self._rows.rows(() if sampling == "greedy" else carried, loaded=True)
        processed = carried if processors_of(rows) else ()
        step = self._decode.load(kv, decode_batch(carried, frames=frames, **self._layout), drawing, sampling, processed)
        self._loaded, self._mask_lines = (step, len(rows)), mask_lines(drawing)
        self._restart(step, rows, places)
        return step.carry

    @_on_device
    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Donates `carry`. Fill the pages in again if the rows still attend in the same way, else load another graph."""
        step, num_rows = self._current(carry)
        if self._ahead.outlives_growth() and self._grow(step, rows, frames):
            return step.carry
        self._ahead.drop()
        places = self._ahead.places
        same = len(rows) == num_rows and self._holds(step, rows)
        if same and self._decode.refresh(step, decode_batch(placed(rows, places), frames=frames, **self._layout)):
            self._restart(step, rows, places)
            return step.carry
        return self.load(model, carry.kv, rows, frames=frames)

    @_on_device
    def narrow(
        self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, grew: bool = False, frames: Frames | None = None
    ) -> DecodeCarry:
        """Donates `carry`. Turn the rows that have ended into padding. Load a smaller graph as soon as one holds the remaining rows."""
        step, _ = self._current(carry)
        if grew and not self._ahead.outlives_growth():
            return self.load(model, carry.kv, rows, frames=frames)
        # The row whose table lists shared pages may have ended.
        if step.kind.size != self._decode.size(len(rows)) or step.kind.way == "shared" or not self._holds(step, rows):
            return self.load(model, carry.kv, rows, frames=frames)
        self._decode.retire(step, self._ahead.narrow(keep, rows))
        if step.kind.sampling in TABLED:
            self._rows.keep(rows)
        if grew and not self._grow(step, rows, frames):
            return self.load(model, carry.kv, rows, frames=frames)
        return step.carry

    @_on_device
    def decode(self, model: Model, carry: DecodeCarry, masks: Masks | None = None) -> tuple[DecodeCarry, Drawn]:
        """Donates `carry`. Replay this step unless it already runs, and wait for its tokens.

        The next step is launched before the wait, if it may run ahead. If a row was loaded that follows a grammar, only the model runs
        ahead: the sampling waits for the masks, which the host fills meanwhile.
        """
        self._require_weights(model)
        step, rows = self._current(carry)
        if step.kind.sampling in TABLED:
            self._rows.ran()
        held = any(line >= 0 for line in self._mask_lines)
        launch = step.run if held else step.replay
        if not self._ahead.take():
            launch()
        if masks is not None:
            self._rows.upload(masks, [self._mask_lines[place] for place in self._ahead.places])
        if held:
            step.draw()
        results, processing = step.fetch(), kept(step.carry.processing)
        if self._ahead.next():
            launch()
        drawn = results.wait(rows)
        require_ranks(model.config.mesh)
        return step.carry, (replace(drawn, processing=processing) if processing else drawn).at(self._ahead.places)

    def take_discarded_count(self) -> int:
        """Return how many tokens ran ahead and were discarded since the last call, and reset the count to 0."""
        return self._ahead.take_discarded_count()

    @_on_device
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
        """Return a carry with its own tensors. Its plan covers all pages of the rows, so it stays valid for all steps that have room."""
        host = decode_batch(rows, frames=frames, **self._layout)
        if branching and not self._together:
            raise InvalidRequestError("branching=True needs the fused kernels, which do not serve all layers of this model on this GPU")
        plans = (0, 0) if branching else self._follow(host, ticket)
        wide = widened(host, dummy_page=self._layout["dummy_page"], frames=frames)
        carry = decode_carry(model, kv, rows, wide, *plans)
        if not fill:
            prompts = whole_prompts(rows, frames=frames, **self._layout)
            self._prompts[ticket] = plan = self._attention.prompt_plans(prompts, together=self._together)
            carry = replace(carry, prompt=to_device(prompts, self._device, *plan.handles))
        carry = for_a_session(carry, self._program)
        self._logits.prepare(kv, carry.batch)
        return carry

    def end(self, ticket: int) -> None:
        """Free the session's plan, or keep it for a later session."""
        self._prompts.pop(ticket, None)
        plan = self._sessions.pop(ticket, None)
        if isinstance(plan, DecodePlans):
            self._spare = [*self._spare[-(SPARE_PLANS - 1) :], plan]

    @_on_device
    def captured(self, function: Callable[..., Any], carry: DecodeCarry, *inputs: Any) -> Callable[..., Any]:
        """The function as a CUDA graph, which may have been captured for an earlier carry of the same shapes."""
        known = [one for one in self._captured if one.fits(function, carry, *inputs)]
        run = known[-1] if known else Captured(function, carry, inputs)
        self._captured = [*(one for one in self._captured if one is not run), run][-CAPTURED:]
        return run

    def _follow(self, host: HostBatch, ticket: int) -> tuple[int, int]:
        """The handles of the plans for all steps of a session that has room in its pages; 0 for the fused plan of its number of rows."""
        shared = None if self._cascades is None else self._cascades.decode(host)
        if shared is not None:
            self._sessions[ticket] = shared
            return shared.handle, shared.handle
        if (fused := self._decode.fused_handle(host)) is not None:
            return fused, fused
        if self._cascades is not None and not self._attention.ready():
            alone = self._cascades.plan(len(host.input_ids))
            if alone.update(own_runs(host.page_counts)):
                self._sessions[ticket] = alone
                return alone.handle, alone.handle
        plan = next((p for p in self._spare if p.batch_size == len(host.input_ids)), None)
        if plan is None:
            plan = self._attention.decode_plans(len(host.input_ids))
        plan.update(host)
        self._spare = [p for p in self._spare if p is not plan]
        self._sessions[ticket] = plan
        first, second = plan.handles
        return first, second

    def _extends(self, rows: Seq[tuple[Sequence, int]]) -> bool:
        """Whether prompt tokens run as the rows of a decode step: they are few, or nearly so few and have many others before them.

        Each row reads all earlier KV of its sequence, split among many programs; a graph of prompts reads it once, in one program.
        """
        count = sum(count for _, count in rows)
        if self._short is not None and count > MOST_ROWS and max(s.num_filled for s, _ in rows) <= LONG_CONTEXT:
            return False
        return count <= self._extend.sizes[-1]

    def _extension(
        self, kv: KVState, rows: Seq[tuple[Sequence, int]], draw: bool, frames: Frames | None, masks: Masks | None
    ) -> Drawn | None:
        """Run a few prompt tokens as the rows of one captured step. Only rows that complete a prompt sample a token that is used."""
        host, whole = prefill_batch(rows, draw=draw, frames=frames, **self._layout), _whole(rows, draw)
        assert host.logit_indices is not None
        sampling: Kind = kind_of([s.request.options for s in whole])
        drawing = [NOTHING] * len(host.input_ids)
        for row, drawn in zip(host.logit_indices.tolist(), self._rows.rows(whole, loaded=False), strict=True):
            drawing[row] = drawn
        step = self._extend.load(kv, token_rows(host, self._layout["page_size"]), drawing, sampling)
        step.run()
        if masks is not None:
            lines = mask_lines(drawing)
            self._rows.upload(masks, [lines[row] for row in host.logit_indices.tolist()])
        step.draw()
        if not whole:
            return None
        results = step.fetch().wait(len(drawing)).at(host.logit_indices)
        require_ranks(self._model.config.mesh)
        return results

    def _grow(self, step: CapturedStep, rows: Seq[Sequence], frames: Frames | None) -> bool:
        """Fill in only the pages of the rows, some of which got more, while a step runs ahead. False if they must be loaded."""
        if frames is not None or not self._holds(step, rows):
            return False
        host = decode_batch(rows, frames=None, **self._layout)
        if not self._decode.add_pages(step, host, self._ahead.places):
            return False
        self._ahead.grow(rows)
        return True

    def _run_prompts(self, model: Model, kv: KVState, host: HostBatch, config: ModelConfig) -> tuple[Tensor, KVState]:
        """Donates `kv`. Run prompts by one call of the model: whole, or as two halves."""
        if self.halves_from is None or len(host.input_ids) < self.halves_from or self._attention.shares(host):
            return self._forward(model.params, kv, self._prompt(host), config)
        assert host.cu_seqlens is not None
        parts = cut(host, middle(host.cu_seqlens), self._layout["page_size"])

        def make() -> list[Batch]:
            plans = self._attention.plan_halves(parts, together=True)
            return [to_device(part, self._device, *handles) for part, handles in zip(parts, plans, strict=True)]

        return self._in_halves(model.params, kv, self._prepared(host, make), config)

    def _prompt(self, host: HostBatch) -> Batch:
        def make() -> Batch:
            return to_device(host, self._device, *self._attention.plan_prompt(host, together=self._together))

        return self._prepared(host, make)

    def _prepared(self, host: HostBatch, make: Callable[[], R]) -> R:
        num_tokens, asked = len(host.input_ids), host.logit_indices
        return prepared(self._model, num_tokens, num_tokens if asked is None else len(asked), make)

    def _restart(self, step: CapturedStep, rows: Seq[Sequence], places: Int64[np.ndarray, "B"]) -> None:
        # A step writes what processors carry in place: a discarded step would already have done so.
        self._ahead.restart(rows, places, allowed=not carries(step.kind.processors))

    def _holds(self, step: CapturedStep, rows: Seq[Sequence]) -> bool:
        """Whether the tables hold the tokens of the rows of a loaded step, if it reads them."""
        return step.kind.sampling not in TABLED or self._rows.holds(rows)

    def _require_weights(self, model: Model) -> None:
        if model.params is not self._model.params:
            raise InvalidRequestError(f"{model!r} has other weights than this state's CUDA graphs: call init_state with this model")

    def _current(self, carry: DecodeCarry) -> tuple[CapturedStep, int]:
        assert self._loaded is not None and self._loaded[0].carry is carry
        return self._loaded

    @_on_device
    def free(self) -> None:
        """Free the graphs but those of `captured`, also if they still run. No step may follow.

        NCCL ends a group of ranks only when no graph has its sums.
        """
        for graphs in (self._decode, self._extend, self._short, self._logits):
            if graphs is not None:
                graphs.free()

    @torch.no_grad()
    def _warm_up(
        self, model: Model, kv: KVState, limits: EngineConfig, warm: Params[Tensor], progress: bool | None, first: FirstStart
    ) -> None:
        prompts = sample_prompts(limits, FUSED_PROMPTS if self._together else COMPILED_PROMPTS, model.config)
        # The largest first: the others then reuse its memory from the graphs' pool.
        kinds = [(graphs, size) for graphs in (self._decode, self._extend) for size in reversed(graphs.sizes)]
        short = [] if self._short is None else self._short.kinds[::-1]
        if self._together:
            first.rehearse(lambda: self._rehearse(kv, kinds, prompts, warm))
        self._attention.load()  # not before: to build FlashInfer's kernels takes all cores
        self._attention.settle(quiet=progress is False)
        # None: tqdm stays quiet where stderr is not a terminal.
        bar = tqdm(
            total=len(prompts) + len(short) + len(kinds), desc="warm-up", unit="graph", disable=None if progress is None else not progress
        )
        with bar:
            for graphs, rows in kinds:
                bar.set_postfix_str(f"{'prompt' if graphs is self._extend else 'batch'} {rows}")
                graphs.capture(kv, rows, graphs.ways(rows))
                bar.update()
            for kind in short:
                assert self._short is not None
                bar.set_postfix_str(f"prompts of {kind.tokens}")
                self._short.capture(kv, kind)
                bar.update()
            for host in prompts:  # last: after steps over several plans, compiled layers are not compiled again per plan
                bar.set_postfix_str(f"prompts {len(host.seq_lens)} x {host.seq_lens[0]}")
                self._forward(warm, kv, self._prompt(host), self._config)
                bar.update()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # graphs keep their memory; the rest was used by the warm-up runs

    def _rehearse(self, kv: KVState, kinds: Seq[tuple[StepGraphs, int]], prompts: Seq[HostBatch], warm: Params[Tensor]) -> None:
        """Do what the warm-up does, but record no graphs, and use no sampled token: one that no kernel has written may be no token."""
        for graphs, rows in kinds:
            graphs.rehearse(kv, rows)
        if self._short is not None:
            for kind in self._short.kinds:
                self._short.prepare(kv, kind)
        for host in prompts:
            plans = own_plans(self._model, host)
            self._forward(warm, kv, to_device(host, self._device, *plans.handles), self._config)


def _whole(rows: Seq[tuple[Sequence, int]], draw: bool) -> list[Sequence]:
    """The sequences that sample a token when their next tokens have run."""
    return [s for s, count in rows if draw and count == s.todo]
