"""Measuring, with a GPU that is none: what is launched, over which memory, and what is refused. Kernels are plain functions here."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.models.layers import rope_angles
from nanovllm.ops.cuts import Cut
from nanovllm.ops.rope_attend import rope_attend
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.tune import device
from nanovllm.tune.search import Unfit
from nanovllm.tune.work import Machine, Work, works

MODEL = random_model(tiny_config(num_layers=3))
MACHINE = Machine(processors=132, memory=200_000)
CACHE = 1 << 20  # bytes of the GPU's cache
WEIGHTS = ("qkv", "o", "gate_up", "down")


class Gpu:
    """Graphs that count what is launched while they are captured, and events whose time stands for it."""

    def __init__(self) -> None:
        self.captured, self.replays, self.launched = 0, 0, list[Any]()

    @contextmanager
    def graph(self, graph: Any) -> Any:
        before = len(self.launched)
        yield
        self.captured = len(self.launched) - before

    def event(self, **_: Any) -> Any:
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1e-3 * self.captured)

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=CACHE))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=made.replay))
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    for name in ("norm_linear", "linear_add_norm"):
        monkeypatch.setattr(device, name, noted(made, getattr(device, name), lambda given: given[1]))
    monkeypatch.setattr(device, "rope_attend", noted(made, lambda *given: rope_attend(*given[:-1], 0), lambda given: given[6]))
    return made


def noted(gpu: Gpu, function: Any, what: Any) -> Any:
    def call(*given: Any, **options: Any) -> Any:
        gpu.launched.append(what(given))
        return function(*given, **options)

    return call


def kernels(rows: int, closely: bool = True) -> list[Work]:
    return list(works(MODEL.config, rows, MACHINE if closely else Machine(processors=132, memory=0)))


@pytest.mark.parametrize(("rows", "closely"), [(1, True), (2, True), (8, False), (40, False)])
def test_every_kernel_is_measured_over_more_than_the_cache_holds(rows: int, closely: bool, gpu: Gpu) -> None:
    for work in kernels(rows, closely):
        gpu.launched.clear()
        with device.measuring(MODEL, work) as measure:
            gpu.launched.clear()
            times = measure(())
        assert times == pytest.approx((1.0,) * len(times))  # a microsecond a launch
        if work.part == "attend":
            assert len(times) == (2 if rows * max(device.CONTEXTS) <= device.TOKENS else 1)
            assert gpu.launched[:3] == [0, 1, 2 % (max(gpu.launched) + 1)]
            continue
        count = len(gpu.launched) // 2  # once to warm up, once captured, one between for its results
        chain = gpu.launched[count + 1 :]
        assert len(chain) == count >= device.LAUNCHES and len(times) == 1
        weights = {id(weight): weight for weight in chain}
        total = sum(weight.numel() * weight.element_size() for weight in weights.values())
        assert total >= 2 * CACHE or len(weights) == device.COPIES
        if work.part in WEIGHTS:
            own = [getattr(w, work.part) for w in MODEL.params.layers]
            assert [chain[n] is own[n] for n in range(3)] == [True] * 3
    assert gpu.replays > 0


def test_attention_reads_rows_of_half_to_the_whole_of_a_context(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def attend(*given: Any) -> torch.Tensor:
        seen.append(given)
        return rope_attend(*given[:-1], 0)

    monkeypatch.setattr(device, "rope_attend", attend)
    with device.measuring(MODEL, next(w for w in kernels(4) if w.part == "attend")):
        pass
    qkv, q_norm, _, cos, sin, pages, _, tables, lens, slots, *_ = seen[0]
    assert lens.tolist() == [256, 213, 171, 128] and q_norm is MODEL.params.layers[0].q_norm
    assert tables.flatten().sort().values.tolist() == list(range(4 * 16)) and pages.shape[1] == 64
    for row, (length, slot) in enumerate(zip(lens.tolist(), slots.tolist(), strict=True)):
        assert slot == tables[row, (length - 1) // 16] * 16 + (length - 1) % 16
    angles = rope_angles(lens, MODEL.params.inv_freq, MODEL.config.rope)
    assert qkv.shape[0] == 4 and (cos.shape, sin.shape, cos.dtype) == (angles[0].shape, angles[1].shape, angles[0].dtype)


def test_wrong_results_and_failures_are_left_out(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = device.norm_linear

    def spoilt(x: Any, weight: Any, *, cut: Cut, **options: Any) -> torch.Tensor:
        y = plain(x, weight, cut=(), **options)
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

    monkeypatch.setattr(device, "norm_linear", spoilt)
    with device.measuring(MODEL, kernels(2)[1]) as measure:
        for cut, said in (((1,), "no kernel: out of resource: shared memory"), ((2,), "wrong by 0.0"), ((3,), "wrong by nan")):
            with pytest.raises(Unfit) as error:
                measure(cut)
            assert str(error.value).startswith(said)
        assert measure((4,)) == measure(())


def test_a_default_that_cannot_run_is_unfit(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no image for this GPU")

    monkeypatch.setattr(device, "norm_linear", refused)
    with pytest.raises(Unfit, match="no image"), device.measuring(MODEL, kernels(2)[1]):
        pass
    monkeypatch.setattr(device, "_random", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(Unfit, match="no memory for it"), device.measuring(MODEL, kernels(2)[1]):
        pass


def test_a_gpu_that_has_failed_ends_the_run(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with device.measuring(MODEL, kernels(2)[1]) as measure:
        monkeypatch.setattr(torch.cuda, "synchronize", failed)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            measure((1, 1, 1))
