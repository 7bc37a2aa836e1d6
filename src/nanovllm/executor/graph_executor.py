"""`GraphExecutor`: decode steps, and short prompts, as replays of CUDA graphs.

A step is: host arrays into the static buffers (only where the rows or their pages changed), replay, tokens fetched. Steps over the same
rows need nothing from the host, so the next one is launched before the host has seen the tokens of this one: it runs while the host
settles them. A row that ended becomes padding; where other rows come or pages change the step is thrown away. The few last tokens of a
prompt, all others being filled, run as the rows of such a graph too.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.attention_plans import Attention, DecodePlans
from nanovllm.executor.batch import HostBatch, decode_batch, prefill_batch, sample_prompts, to_device, token_rows
from nanovllm.executor.captured_step import CapturedStep, StepKind
from nanovllm.executor.carry import decode_carry, draw_first, sampling_rows
from nanovllm.executor.cascade_policy import Cascades, cascade_policy
from nanovllm.executor.compiled import COMPILED_PROMPTS, compiled_forward, fused_forward
from nanovllm.executor.cuda_graphs import GREEDY, StepGraphs, batch_sizes, extension_sizes
from nanovllm.executor.decode import DecodeCarry
from nanovllm.executor.executor import Drawn
from nanovllm.executor.run_ahead import RunAhead, longest_first, placed
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Params, two_of_each
from nanovllm.models.fast import fused
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.ops.attention.cascade_plan import CascadePlan
from nanovllm.sampling import tensors
from nanovllm.sampling.params import SamplingParams, from_generation_config
from nanovllm.state.kv_cache import KVState
from nanovllm.state.pool_sizes import dummies
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Int64, Tensor

P = ParamSpec("P")
R = TypeVar("R")
NOTHING: tensors.Row = (SamplingParams(temperature=0), 0, tensors.NO_IDS, tensors.NO_IDS)  # a row that nobody looks at


# Rows and tokens: as many ways to cut products, beside those of decode steps, and each for multiples of 16, for which kernels are smaller.
FUSED_PROMPTS = ((1, 160), (1, 161), (1, 224), (1, 225), (1, 512), (2, 256), (16, 32))
SPARE_PLANS = 8  # attention plans of ended sessions that are kept for later ones


def _on_device(method: Callable[Concatenate["GraphExecutor", P], R]) -> Callable[Concatenate["GraphExecutor", P], R]:
    """Kernels, events and graphs go to the current device: make it the executor's for the call."""

    @wraps(method)
    def call(self: "GraphExecutor", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(self._device):
            return method(self, *args, **kwargs)

    return call


class GraphExecutor:
    """See `compile.Executor`. Holds what cannot be a value: graphs, static buffers, attention plans, and compiled functions for models that
    the kernels do not serve."""

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
    ):
        """Capture for every batch size steps that are greedy, that only have a temperature, and that have the features of the
        model's own `generation_config`; others, those that read shared pages once, and those of few rows with very many tokens, are
        captured when they are first asked for.

        `kv` is the memory that the graphs will read and write; of its contents only the dummy page changes. `cascade`: see `init_state`.
        `choice`: the layers that the fused kernels may run; None: all. `cuts`: how they cut their work; None: by their defaults.
        """
        self._device, self._model = model.device, model
        self._layout = {"page_size": limits.page_size, "dummy_page": dummies(model.config, limits)[0]}
        served = fused.serves(model.params, model.config) and (choice is None or any(choice.layers))
        self._forward = fused_forward(model, choice, cuts) if served else compiled_forward(model)
        # Where all layers have a window what is shared is seldom seen, and its pages may have no frames.
        apart = cascade is False or (cascade is None and model.config.all_windowed)
        policy = None if apart else cascade_policy(model, limits, always=bool(cascade))
        self._attention = Attention(model, limits, policy)
        self._cascades = None if policy is None else Cascades(model, limits, policy)
        usual, sizes = tuple(_usual_features(model)), batch_sizes(limits.max_num_seqs)
        # Plain layers can attend neither by a fused plan, nor where the new keys and values of prompts lie together.
        self._together = served and (choice is None or choice.all_layers)
        warm = two_of_each(model.params) if self._together and not model.config.windows else model.params
        self._decode = StepGraphs(
            model, limits, sizes, self._forward, usual, self._attention, self._cascades, fused=self._together, cuts=cuts, warm=warm
        )
        # The tokens of a prompt share nearly all that they see, whatever sequences do.
        within = None if self._cascades is None else self._cascades.within(replace(self._cascades.policy, always=True))
        sizes = extension_sizes(limits.max_num_batched_tokens)
        attention = self._attention if within is None else None
        self._extend = StepGraphs(model, limits, sizes, self._forward, usual, attention, within, fused=False, warm=warm)
        self._sessions: dict[int, DecodePlans | CascadePlan] = {}
        self._spare: list[DecodePlans] = []
        self._loaded: tuple[CapturedStep, int] | None = None  # the decode step filled in, rows in use
        self._ahead = RunAhead(limits.page_size)
        self._warm_up(model, kv, limits, warm, progress)

    @_on_device
    def prefill(
        self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], *, draw: bool = True, frames: Frames | None = None
    ) -> tuple[Drawn | None, KVState]:
        """See `Executor`."""
        features = tensors.features([s.request.sampling for s, count in rows if draw and count == s.todo])
        few = sum(count for _, count in rows) <= self._extend.sizes[-1]
        if few and features in self._extend.usual and model.params is self._model.params:
            return self._extension(kv, rows, features, draw, frames), kv
        host = prefill_batch(rows, draw=draw, frames=frames, **self._layout)
        logits, kv = self._forward(model.params, kv, self._prompt(host), model.config)
        return draw_first(logits, rows, model) if draw else None, kv

    @_on_device
    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`. The carry is the static memory of the graph for these rows, the longest first."""
        self._require_weights(model)
        features = tensors.features([s.request.sampling for s in rows])
        self._ahead.drop()
        self._loaded = None
        places = longest_first(rows)
        carried = placed(rows, places)
        drawing = () if features == GREEDY else sampling_rows(carried)
        step = self._decode.load(kv, decode_batch(carried, frames=frames, **self._layout), drawing, features)
        self._loaded = step, len(rows)
        self._restart(step, rows, places)
        return step.carry

    @_on_device
    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`."""
        step, held = self._current(carry)
        self._ahead.drop()
        places = self._ahead.places
        if len(rows) == held and self._decode.refresh(step, decode_batch(placed(rows, places), frames=frames, **self._layout)):
            self._restart(step, rows, places)
            return step.carry
        return self.load(model, carry.kv, rows, frames=frames)

    @_on_device
    def narrow(self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`. The rows that have ended become padding, until fewer rows than another graph holds are left."""
        step, _ = self._current(carry)
        if step.kind.size != self._decode.size(len(rows)) or step.kind.features.penalties or step.kind.way == "shared":
            return self.load(model, carry.kv, rows, frames=frames)  # what stands for shared pages may be a row that has ended
        self._decode.retire(step, self._ahead.narrow(keep, rows))
        return step.carry

    @_on_device
    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """See `Executor`. One replay, of the step after this one where that may be; waits for this one's tokens."""
        self._require_weights(model)
        step, rows = self._current(carry)
        if not self._ahead.take():
            step.graph.replay()
        results = step.fetch()
        if self._ahead.next():
            step.graph.replay()
        return step.carry, results.wait(rows).at(self._ahead.places)

    def thrown_away(self) -> int:
        """See `Executor`."""
        return self._ahead.thrown_away()

    @_on_device
    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int, *, frames: Frames | None = None) -> DecodeCarry:
        """See `Executor`. The plan covers every page that the rows hold, so that it stays valid for all steps there is room for."""
        host = decode_batch(rows, frames=frames, **self._layout)
        shared = None if self._cascades is None else self._cascades.decode(host)
        if shared is not None:
            carry = decode_carry(model, kv, rows, host, shared.handle)
            self._sessions[ticket] = shared
            return carry
        plan = next((p for p in self._spare if p.batch_size == len(rows)), None)
        if plan is None:
            plan = self._attention.decode_plans(len(rows))
        plan.update(host)
        carry = decode_carry(model, kv, rows, host, *plan.handles)
        self._spare = [p for p in self._spare if p is not plan]
        self._sessions[ticket] = plan
        return carry

    def end(self, ticket: int) -> None:
        """See `Executor`."""
        plan = self._sessions.pop(ticket, None)
        if isinstance(plan, DecodePlans):
            self._spare = [*self._spare[-(SPARE_PLANS - 1) :], plan]

    def _extension(
        self, kv: KVState, rows: Seq[tuple[Sequence, int]], features: tensors.Features, draw: bool, frames: Frames | None
    ) -> Drawn | None:
        """Few tokens of prompts as the rows of one captured step; a row that is not the last of a whole prompt draws for nobody."""
        host = prefill_batch(rows, draw=draw, frames=frames, **self._layout)
        assert host.logit_indices is not None
        drawing = [NOTHING] * len(host.input_ids)
        whole = sampling_rows([s for s, count in rows if draw and count == s.todo])
        for row, drawn in zip(host.logit_indices.tolist(), whole, strict=True):
            drawing[row] = drawn
        step = self._extend.load(kv, token_rows(host, self._layout["page_size"]), drawing, features)
        step.graph.replay()
        return step.fetch().wait(len(drawing)).at(host.logit_indices) if whole else None

    def _prompt(self, host: HostBatch) -> Batch:
        return to_device(host, self._device, *self._attention.plan_prompt(host, together=self._together))

    def _restart(self, step: CapturedStep, rows: Seq[Sequence], places: Int64[np.ndarray, "B"]) -> None:
        # Counts of drawn tokens are written in place: a step that is thrown away would have counted.
        self._ahead.restart(rows, places, allowed=not step.kind.features.penalties)

    def _require_weights(self, model: Model) -> None:
        if model.params is not self._model.params:
            raise InvalidRequestError(f"{model!r} has other weights than this state's graphs were captured with: make a state for it")

    def _current(self, carry: DecodeCarry) -> tuple[CapturedStep, int]:
        assert self._loaded is not None and self._loaded[0].carry is carry
        return self._loaded

    @torch.no_grad()
    def _warm_up(self, model: Model, kv: KVState, limits: EngineConfig, warm: Params[Tensor], progress: bool | None) -> None:
        prompts = sample_prompts(limits, FUSED_PROMPTS if self._together else COMPILED_PROMPTS, model.config)
        # The largest first: the others find its memory in the pool.
        kinds = [(graphs, size) for graphs in (self._decode, self._extend) for size in reversed(graphs.sizes)]
        # None: tqdm stays quiet where stderr is not a terminal.
        bar = tqdm(total=len(prompts) + len(kinds), desc="warm-up", unit="graph", disable=None if progress is None else not progress)
        with bar:
            for graphs, rows in kinds:
                bar.set_postfix_str(f"{'prompt' if graphs is self._extend else 'batch'} {rows}")
                for features in graphs.usual:
                    graphs.capture(kv, StepKind(size=rows, features=features, way=graphs.way()))
                bar.update()
            for host in prompts:  # after steps over several plans, or each plan of prompts would be compiled for, where layers are
                bar.set_postfix_str(f"prompts {len(host.seq_lens)} x {host.seq_lens[0]}")
                self._forward(warm, kv, self._prompt(host), model.config)
                bar.update()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # graphs keep what they need; the rest was for the runs before them


def _usual_features(model: Model) -> dict[tensors.Features, None]:
    usual = dict.fromkeys((GREEDY, tensors.Features(temperature=True)))
    with suppress(InvalidRequestError):  # a generation_config that SamplingParams refuse concerns those who ask for it
        usual[tensors.features([from_generation_config(model.generation_config)])] = None
    return usual
