"""Measurements on a GPU: layers of a decode step with given tile configurations, or the head, in a CUDA graph."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from nanovllm.entrypoints.cli.tune import one_kernel
from nanovllm.entrypoints.cli.tune.kernel_search import Times, Unfit
from nanovllm.entrypoints.cli.tune.layer_chain import Plans, chain_length, contexts, run_layers
from nanovllm.entrypoints.cli.tune.layer_search import Bench
from nanovllm.entrypoints.cli.tune.one_kernel import Alone
from nanovllm.models.check.examine import kernel_errors
from nanovllm.models.fast.cuts import StepCuts
from nanovllm.models.model import Model
from nanovllm.models.tuning.launches import Work
from nanovllm.ops.compile_ahead import compile_ahead
from nanovllm.ops.cuts import Cut, CutError

REPEATS = 15  # replays of a graph; the median counts


class Recorder:
    """Records launches as CUDA graphs, one at a time, on one stream and in one memory pool.

    Unlike `torch.cuda.graph`, it does not empty torch's cache before each graph. The last graph is kept until the next one is recorded,
    because the pool is freed with its last graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        """Call `run` once, then record it as a graph. Returns a function that replays the graph.

        The first call compiles and loads the kernels, because neither may happen during the capture.
        """
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if self._last is None else self._last.pool()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            run()
            torch.cuda.synchronize()
            graph.capture_begin(pool=pool)
            try:
                run()
            finally:
                graph.capture_end()
        self._last = graph
        return graph.replay


@contextmanager
def measuring(model: Model, recorder: Recorder, works: tuple[Work, ...]) -> Iterator[Bench]:
    """What measures the kernels of a layer, or the head.

    For a layer `measure` returns microseconds per layer in a chain, for each context. For the head it returns microseconds per launch.
    Before a tile configuration is timed, its kernel alone must give the same results as the default. `prepare` compiles in threads. The
    memory is freed at the end of the block. Raises `Unfit` if the defaults cannot run.
    """
    with torch.no_grad(), torch.cuda.device(model.device):
        try:
            made = [_head(model, recorder, *works) if works[0].part == "head" else _layers(model, recorder, works)]
        except torch.OutOfMemoryError as error:
            raise Unfit("not enough memory") from error

        def measure(cuts: StepCuts) -> Times:
            return made[0].measure(cuts)

        def prepare(part: str, cuts: Seq[Cut]) -> None:
            made[0].prepare(part, cuts)

        try:
            yield Bench(measure=measure, prepare=prepare)
        finally:
            made.clear()  # the functions may outlive the block, but must not keep the KV alive
            torch.cuda.empty_cache()


def _head(model: Model, recorder: Recorder, work: Work) -> Bench:
    kernel = one_kernel.head(model, work)
    prepare = _preparing(model, {work.part: [kernel]})
    checks = Checks({work.part: [kernel]})

    def run(cut: Cut) -> None:
        for number in range(kernel.count):
            kernel.launch(number, cut)

    def measure(cuts: StepCuts) -> Times:
        checks.require(cuts)
        return (_time(recorder, partial(run, cuts.head)) / kernel.count,)

    return Bench(measure=measure, prepare=prepare)


def _layers(model: Model, recorder: Recorder, works: tuple[Work, ...]) -> Bench:
    rows, count = works[0].rows, chain_length(model)
    plans, settings = Plans(model, rows), contexts(model, rows, count)
    x = torch.randn(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
    kernels = {work.part: [one_kernel.product(model, work)] for work in works if work.form != "attend"}
    kernels["attend"] = [one_kernel.attention(model, setting, plans) for setting in settings]
    prepare = _preparing(model, kernels)
    checks = Checks(kernels)

    def measure(cuts: StepCuts) -> Times:
        checks.require(cuts)
        plan = plans.at(cuts.attend)
        return tuple(_time(recorder, partial(run_layers, model, setting, plan, cuts, x, count)) / count for setting in settings)

    return Bench(measure=measure, prepare=prepare)


def _preparing(model: Model, kernels: dict[str, list[Alone]]) -> Callable[[str, Seq[Cut]], None]:
    """A function that compiles the kernels of a part for several tile configurations at once. The defaults are compiled now."""

    def prepare(part: str, cuts: Seq[Cut]) -> None:
        compile_ahead(model.device, [partial(kernel.launch, 0, cut) for kernel in kernels[part] for cut in cuts])

    compile_ahead(model.device, [partial(kernel.launch, 0, ()) for some in kernels.values() for kernel in some])
    return prepare


class Checks:
    """Checks that kernels give the same results with a tile configuration as by default. Each is checked once; errors are remembered."""

    def __init__(self, kernels: dict[str, list[Alone]]) -> None:
        """Run the defaults. Raises `Unfit` if one cannot run."""
        self._kernels = kernels
        self._wanted = {part: [kernel.results(()) for kernel in some] for part, some in kernels.items()}
        self._seen: dict[tuple[str, Cut], str] = {}

    def require(self, cuts: StepCuts) -> None:
        """Raise `Unfit` if one of these tile configurations cannot be used."""
        for part in self._kernels:
            cut: Cut = getattr(cuts, part)
            if cut and (part, cut) not in self._seen:
                self._seen[part, cut] = self._look(part, cut)
            if cut and (reason := self._seen[part, cut]):
                raise Unfit(reason)

    def _look(self, part: str, cut: Cut) -> str:
        try:
            for kernel, want in zip(self._kernels[part], self._wanted[part], strict=True):
                one_kernel.require_same(kernel.results(cut), want)
        except Unfit as error:
            return str(error)
        return ""


def _time(recorder: Recorder, run: Callable[[], object]) -> float:
    """Median microseconds of the launches of `run`. Raises `Unfit` if a launch fails."""
    try:
        return 1e3 * _median_ms(recorder.record(run))
    except (*kernel_errors(), CutError, RuntimeError) as error:
        raise one_kernel.no_kernel(error) from error


def _median_ms(replay: Callable[[], object]) -> float:
    """Median milliseconds of a replay, after three replays that do not count."""
    times = []
    for number in range(REPEATS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    return median(times)
