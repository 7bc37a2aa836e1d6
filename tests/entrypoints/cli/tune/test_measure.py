"""Measuring, with a GPU that is none: what is launched, over which memory, and what is refused. Kernels are plain functions here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, ref

import pytest
import torch

from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.tune import layer_chain, one_kernel
from nanovllm.entrypoints.cli.tune import measure as measure_module
from nanovllm.entrypoints.cli.tune.kernel_search import Unfit
from nanovllm.entrypoints.cli.tune.layer_chain import CONTEXTS, LAYERS, fitting
from nanovllm.entrypoints.cli.tune.layer_search import StepMeasure
from nanovllm.models.fast import fused
from nanovllm.models.fast.cuts import DEFAULT, StepCuts
from nanovllm.models.tuning.launches import Machine, Work, works
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.ops.cuts import Cut
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config(num_layers=3))
MACHINE = Machine(processors=132, memory=200_000)
CACHE = 1 << 20  # bytes of the GPU's cache


class Graph:
    """A graph that counts what is launched while it is captured."""

    def __init__(self, gpu: "Gpu") -> None:
        self.gpu, self.memory = gpu, None

    def capture_begin(self, pool: Any) -> None:
        assert pool in self.gpu.fresh or any(pool == graph.memory for graph in self.gpu.graphs), "a pool that no graph holds is gone"
        self.gpu.fresh.clear()
        self.before, self.memory = len(self.gpu.launched), pool

    def capture_end(self) -> None:
        self.gpu.captured = self.gpu.launched[self.before :]

    def pool(self) -> Any:
        return self.memory

    def replay(self) -> None:
        self.gpu.replays += 1


class Gpu:
    """Events whose time is a microsecond a launch of the last graph. Kernels note the memory they read, and their cuts."""

    def __init__(self) -> None:
        self.launched, self.captured = list[Any](), list[Any]()
        self.replays, self.pools, self.free = 0, 0, 1 << 40
        self.graphs, self.fresh = WeakSet[Graph](), set[Any]()

    def graph(self) -> Graph:
        made = Graph(self)
        self.graphs.add(made)
        return made

    def handle(self) -> tuple[int, int]:
        self.pools += 1
        self.fresh.add((self.pools, 0))
        return (self.pools, 0)

    def event(self, **_: Any) -> Any:
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1e-3 * len(self.captured))

    def noted(self, function: Any, what: Callable[..., Any]) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            self.launched.append(what(*given, **options))
            return function(*given, **options)

        return call


def attend(*given: Any) -> torch.Tensor:
    assert isinstance(lookup(given[12]), FusedDecodePlan)
    return rope_attend(*given[:12], 0, *given[13:])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    for name, other in {
        "device": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=CACHE),
        "mem_get_info": lambda _: (made.free, made.free),
        "memory_reserved": lambda _: 0,
        "memory_allocated": lambda _: 0,
        "Stream": lambda _: None,
        "stream": lambda _: nullcontext(),
        "graph_pool_handle": made.handle,
        "CUDAGraph": made.graph,
        "Event": made.event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, other)
    for place in (one_kernel, fused):
        for name in ("norm_linear", "linear_add_norm"):
            noted = made.noted(getattr(place, name), lambda x, weight, *_, cut=(), **__: (weight, cut))
            monkeypatch.setattr(place, name, noted)
        monkeypatch.setattr(place, "rope_attend", made.noted(attend, lambda *given: (given[5:7], cut_of_plan(given[12]))))
    return made


def cut_of_plan(handle: int) -> Cut:
    plan = lookup(handle, FusedDecodePlan)
    return (plan.tile, plan.warps, plan.stages, plan.splits)


@pytest.fixture
def closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU runs few rows."""
    monkeypatch.setattr(fused, "follows_closely", lambda *_: True)


def layer_of(rows: int, closely: bool = True) -> tuple[Work, ...]:
    found = works(MODEL.config, rows, MACHINE if closely else Machine(processors=132, memory=0))
    return tuple(work for work in found if work.part != "head")


def head_of(rows: int) -> tuple[Work, ...]:
    return tuple(work for work in works(MODEL.config, rows, MACHINE) if work.part == "head")


def bench_of(group: tuple[Work, ...]) -> Any:
    return measure_module.measuring(MODEL, measure_module.Recorder(torch.device("cpu")), group)


@contextmanager
def measuring(group: tuple[Work, ...]) -> Iterator[StepMeasure]:
    with bench_of(group) as bench:
        yield bench.measure


def test_kernels_are_compiled_before_they_are_measured(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each part the default, then the candidates that a search announces."""
    monkeypatch.setattr(fused, "follows_closely", lambda *_: False)
    ahead = list[int]()

    def compile_ahead(device: torch.device, calls: Any) -> None:
        before = len(gpu.launched)
        for call in calls:
            call()
        ahead.append(len(gpu.launched) - before)

    monkeypatch.setattr(measure_module, "compile_ahead", compile_ahead)
    with bench_of(layer_of(2, False)) as bench:
        assert ahead == [6]  # four products, and attention over two contexts
        bench.prepare("qkv", [(1,), (2,), (3,)])
        assert [cut for _, cut in gpu.launched[-3:]] == [(1,), (2,), (3,)]


@pytest.mark.parametrize(("rows", "few"), [(1, True), (2, True), (8, False), (40, False)])
def test_whole_layers_are_timed_one_behind_the_other(rows: int, few: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer's own weights and KV, in the order of a step, again from the first where there are few; by these cuts."""
    monkeypatch.setattr(fused, "follows_closely", lambda *_: few)
    count = layer_chain.chain_length(MODEL)
    cuts = StepCuts(qkv=(1,), attend=(32, 2, 2, 4), o=(2,), gate_up=(3,), down=(4,))
    with measuring(layer_of(rows, few)) as measure:
        for given in (DEFAULT, cuts):
            times = measure(given)
            assert times == pytest.approx((5.0,) * len(times))  # a microsecond a launch
            assert len(times) == (2 if rows * max(CONTEXTS) <= layer_chain.TOKENS else 1)
            assert count == LAYERS and len(gpu.captured) == 5 * count
            steps = [gpu.captured[n : n + 5] for n in range(0, len(gpu.captured), 5)]
            for number, (qkv, attend, o, gate_up, down) in enumerate(steps):
                w = MODEL.params.layers[number % 3]
                for part, (weight, cut) in {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down}.items():
                    assert weight is getattr(w, part) and cut == getattr(given, part)
                (pages, index), cut = attend
                assert len(pages) == count and index == number and (cut == given.attend or not given.attend)
    assert gpu.replays > 0 and gpu.pools == 1


def test_a_chain_is_longer_than_the_cache_is_large() -> None:
    """But not than the model: what is in a cache in a model's steps is in one here."""
    config = tiny_config(num_layers=40)
    for cached, length in ((0, LAYERS), (1 << 30, 40)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda _, cached=cached: SimpleNamespace(L2_cache_size=cached))
            assert layer_chain.chain_length(random_model(config)) == length
    layer = random_model(config).params.layers[0]
    size = sum(t.numel() * 4 for t in (layer.qkv, layer.o, layer.gate_up, layer.down, layer.input_norm, layer.post_norm))
    size += sum(t.numel() * 4 for t in (layer.q_norm, layer.k_norm) if t is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=10 * size))
        assert layer_chain.chain_length(random_model(config)) == 20


def test_the_head_is_timed_by_itself_over_more_than_the_cache_holds(gpu: Gpu) -> None:
    with measuring(head_of(2)) as measure:
        assert measure(DEFAULT) == pytest.approx((1.0,)) and measure(StepCuts(head=(7,))) == pytest.approx((1.0,))
    weights = {id(weight): weight for weight, _ in gpu.captured}
    assert {cut for _, cut in gpu.captured} == {(7,)} and len(gpu.captured) >= one_kernel.LAUNCHES
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    assert total >= 2 * CACHE and gpu.captured[0][0] is (MODEL.params.embed if MODEL.params.head is None else MODEL.params.head)


def test_rows_are_of_half_to_the_whole_of_a_context(gpu: Gpu) -> None:
    short, long = layer_chain.contexts(MODEL, 4, 3)
    assert short.batch.seq_lens.tolist() == [256, 213, 171, 128] and long.batch.seq_lens.tolist() == [1024, 853, 683, 512]
    every = torch.cat((short.batch.page_tables, long.batch.page_tables), 1).flatten()
    assert every.sort().values.tolist() == list(range(4 * 80))  # no page is two rows'
    for context in (short, long):
        at = context.batch
        for row, (length, slot) in enumerate(zip(at.seq_lens.tolist(), at.slots.tolist(), strict=True)):
            assert slot == at.page_tables[row, (length - 1) // 16] * 16 + (length - 1) % 16
        assert at.page_tables.is_contiguous() and at.positions.tolist() == [length - 1 for length in at.seq_lens.tolist()]
        assert context.pages is short.pages and context.pages.shape[:2] == (3, 320) and context.cos.shape == (4, 1, 16)


def test_kv_is_of_what_there_is_memory_for() -> None:
    config = SHAPES["qwen3-0.6b"]
    token = 2 * 2 * config.num_kv_heads * config.head_dim  # bytes in a layer
    both, short = token * sum(CONTEXTS), token * CONTEXTS[0]
    for rows, free, want in (
        (1, 16 * both, (CONTEXTS, 16)),
        (16, 256 * both, (CONTEXTS, 16)),
        (17, 1 << 40, (CONTEXTS[:1], 16)),  # more tokens than are measured
        (1, 15 * both, (CONTEXTS[:1], 16)),
        (1, 16 * short, (CONTEXTS[:1], 16)),
        (1, 16 * short - 1, (CONTEXTS[:1], 15)),
        (64, 64 * short, (CONTEXTS[:1], 1)),
    ):
        assert fitting(config, torch.bfloat16, rows, 16, int(free / layer_chain.SHARE) + 1) == want
    with pytest.raises(Unfit, match="not enough memory"):
        fitting(config, torch.bfloat16, 64, 16, int(63 * short))


def test_layers_share_kv_where_memory_is_short(gpu: Gpu, closely: None) -> None:
    gpu.free = int(2.5 * 256 * 2 * 4 * MODEL.config.num_kv_heads * MODEL.config.head_dim / layer_chain.SHARE)
    with measuring(layer_of(1)) as measure:
        assert len(measure(DEFAULT)) == 1
    places = [what[0][1] for what in gpu.captured if isinstance(what[0], tuple)]
    assert places == [n % 2 for n in range(LAYERS)]
    gpu.free = 0
    with pytest.raises(Unfit, match="not enough memory"), measuring(layer_of(1)):
        pass


def test_the_memory_is_given_back_whoever_still_holds_the_measure(gpu: Gpu, closely: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    plain = layer_chain.contexts
    monkeypatch.setattr(measure_module, "contexts", lambda *given: made.extend(found := plain(*given)) or found)
    spoil(monkeypatch)
    with measuring(layer_of(2)) as measure:
        for cuts in (DEFAULT, StepCuts(qkv=(4,))):
            measure(cuts)
        with pytest.raises(Unfit):
            measure(StepCuts(qkv=(1,)))
        pages = ref(made[0].pages)
        made.clear()
        gpu.launched.clear()
        gpu.captured.clear()
    assert measure and pages() is None


def spoil(monkeypatch: pytest.MonkeyPatch) -> list[Cut]:
    """Kernels by some cuts fail or are wrong, where they are looked at by themselves; returns what was looked at."""
    plain, looked = one_kernel.norm_linear, list[Cut]()

    def spoilt(x: Any, weight: Any, *, cut: Cut, **options: Any) -> torch.Tensor:
        y = plain(x, weight, cut=(), **options)
        looked.append(cut)
        match cut:
            case (1,):
                raise RuntimeError("out of  resource:\n shared memory")
            case (2,):
                return y * 1.01
            case (3,):
                return y * torch.nan
            case (4,):
                return y * (1 + 2e-7)
        return y

    monkeypatch.setattr(one_kernel, "norm_linear", spoilt)
    return looked


def test_wrong_results_and_failures_are_left_out(gpu: Gpu, closely: None, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = spoil(monkeypatch)
    with measuring(layer_of(2)) as measure:
        wrong = "wrong results: relative error"
        for cut, said in (((1,), "the kernel failed: out of resource: shared memory"), ((2,), f"{wrong} 0.0"), ((3,), f"{wrong} nan")):
            for cuts in (StepCuts(qkv=cut), StepCuts(o=(5,), qkv=cut)):
                gpu.captured = []
                with pytest.raises(Unfit) as error:
                    measure(cuts)
                assert str(error.value).startswith(said) and not gpu.captured  # before it is timed
        assert measure(StepCuts(qkv=(4,))) == measure(DEFAULT)
        assert looked.count((1,)) == 1 and looked.count((4,)) == 1 + len(MODEL.params.layers)  # once, however often it is timed


def test_attention_is_looked_at_in_every_context(gpu: Gpu, closely: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(*given: Any) -> torch.Tensor:
        return attend(*given) * (1.01 if cut_of_plan(given[12]) == (32, 4, 0, 64) and given[8].max() > 256 else 1.0)

    monkeypatch.setattr(one_kernel, "rope_attend", spoilt)
    with measuring(layer_of(2)) as measure, pytest.raises(Unfit, match=r"wrong results: relative error 0\.0"):
        measure(StepCuts(attend=(32, 4, 0, 64)))


def test_a_chain_that_cannot_be_launched_is_left_out(gpu: Gpu, closely: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fused.norm_linear

    def scarce(x: Any, weight: Any, *, cut: Cut = (), **options: Any) -> torch.Tensor:
        if cut:
            raise torch.OutOfMemoryError("no room for parts")
        return plain(x, weight, **options)

    with measuring(layer_of(2)) as measure:
        monkeypatch.setattr(fused, "norm_linear", scarce)
        with pytest.raises(Unfit, match="no room for parts"):
            measure(StepCuts(qkv=(4,)))
        assert measure(DEFAULT) == pytest.approx((5.0, 5.0))


def test_a_default_that_cannot_run_is_unfit(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no image for this GPU")

    monkeypatch.setattr(one_kernel, "norm_linear", refused)
    for group in (layer_of(2), head_of(2)):
        with pytest.raises(Unfit, match="no image"), measuring(group):
            pass
    monkeypatch.setattr(one_kernel, "_random", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    for group in (layer_of(2), head_of(2)):
        with pytest.raises(Unfit, match="not enough memory"), measuring(group):
            pass


def test_a_gpu_that_has_failed_ends_the_run(gpu: Gpu, closely: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with measuring(layer_of(2)) as measure:
        monkeypatch.setattr(torch.cuda, "synchronize", failed)
        for cuts in (StepCuts(qkv=(1, 1, 1)), DEFAULT):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                measure(cuts)
