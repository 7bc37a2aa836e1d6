"""The record of passed checks: which weights and settings it tells apart, and when a start compares again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from torch import Tensor
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.executor import build_executor as building
from nanovllm.models.check import passed as record
from nanovllm.models.check.passed import note_passed, passed, weights_digest
from nanovllm.models.fast.choice import FastChoice, all_fast
from nanovllm.models.fast.cuts import Cuts, StepCuts
from nanovllm.ops.linear.quantise import quantise
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config())
CUTS = Cuts(steps=Map({1: StepCuts(head=(16, 8, 4))}), source="file.json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def with_weight(model: nv.Model, change: Callable[[Tensor], Tensor]) -> nv.Model:
    """The model with its last matrix changed."""
    leaves, spec = pytree.tree_flatten(model.params)
    place = next(place for place, leaf in reversed([*enumerate(leaves)]) if isinstance(leaf, Tensor) and leaf.ndim == 2)
    leaves[place] = change(leaves[place])
    return replace(model, params=pytree.tree_unflatten(leaves, spec))


@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]))
def test_a_digest_tells_any_changed_bit(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = data.draw(st.sampled_from([(1,), (7,), (3, 5), (8, 16), (2, 3, 4)]))
    tensor = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]
    changed = tensor.clone()
    place = data.draw(st.integers(0, changed.numel() * dtype.itemsize - 1))
    changed.view(-1).view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert weights_digest(tensor) == weights_digest(tensor.clone()) != weights_digest(changed)


def test_a_digest_tells_places_shapes_dtypes_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(24, dtype=torch.float32)
    swapped = values.clone()
    swapped[[3, 20]] = swapped[[20, 3]]
    parts = [[values], [swapped], [values.view(4, 6)], [values.view(torch.int32)], [values[:9], values[9:]], [values[9:], values[:9]], []]
    assert len({weights_digest(each) for each in parts}) == len(parts)
    whole = weights_digest([values[9:]])
    assert whole == weights_digest([values[9:].clone()])
    monkeypatch.setattr(record, "WORDS", 4)
    pieces = {weights_digest([each]) for each in (values, swapped)}
    assert len(pieces) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_changed_signs_do_not_cancel(dtype: torch.dtype) -> None:
    """The sign of every number that has the highest bit of a word of 8 bytes."""
    weight = (torch.randn(64, 64) * 50).to(dtype)
    each = 8 // dtype.itemsize
    for step in (each, 2 * each):
        changed = weight.clone()
        changed[:, each - 1 :: step] *= -1
        assert weights_digest(changed) != weights_digest(weight)


def test_a_tensor_may_be_empty() -> None:
    assert weights_digest([torch.empty(0)]) != weights_digest([torch.empty(0, 3)]) != weights_digest([])


def test_quantised_weights_are_part_of_the_digest() -> None:
    codes = quantise(torch.randn(8, 128), "int4")
    other = replace(codes, scales=codes.scales * 2)
    assert weights_digest(codes) != weights_digest(other)


def test_only_what_passed_is_recorded(cache: Path) -> None:
    others: list[tuple[nv.Model, int, Cuts | None]] = [
        (MODEL, 32, None),
        (MODEL, 16, CUTS),
        (with_weight(MODEL, lambda weight: weight * (1 + 2**-20)), 16, None),
        (replace(MODEL, config=replace(MODEL.config, rms_norm_eps=0.5)), 16, None),
    ]
    assert not passed(MODEL, 16, None)
    note_passed(MODEL, 16, None)
    assert passed(MODEL, 16, None) and not any(passed(*other) for other in others)
    for other in others:
        note_passed(*other)
        assert passed(*other)
    assert passed(replace(MODEL, name="another"), 16, None), "the name does not matter"
    assert len(list((cache / "nanovllm" / record.FOLDER).iterdir())) == 5


def test_changed_sources_need_another_check(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "kernel.py").write_text("a = 1")
    monkeypatch.setattr(record.ops, "__file__", str(package / "__init__.py"))
    note_passed(MODEL, 16, None)
    assert passed(MODEL, 16, None)
    (package / "deep" / "kernel.py").write_text("a = 2")
    assert not passed(MODEL, 16, None)


def test_a_cache_that_cannot_be_used_records_nothing(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    note_passed(MODEL, 16, None)
    assert not passed(MODEL, 16, None)


def test_a_folder_that_others_can_write_is_not_believed(cache: Path) -> None:
    note_passed(MODEL, 16, None)
    (cache / "nanovllm").chmod(0o777)
    assert not passed(MODEL, 16, None)


@pytest.mark.parametrize("outcome", ["whole", "a layer falls back", "the head falls back"])
def test_a_start_compares_until_all_layers_passed(outcome: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which the model's device only says it is."""
    chosen = {
        "whole": all_fast(MODEL.config),
        "a layer falls back": FastChoice(layers=(False, *(True,) * (MODEL.config.num_layers - 1))),
        "the head falls back": replace(all_fast(MODEL.config), head=False),
    }[outcome]
    warning = "" if chosen.whole else f"{outcome} and will run in plain torch"
    monkeypatch.setattr(building, "choose", lambda *_: (chosen, warning))
    monkeypatch.setattr(building, "_captures", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    on_gpu, limits = replace(MODEL, device=torch.device("cuda")), nv.init_state(MODEL, num_pages=8).config

    def compares(check: bool | None = None, **changed: Any) -> bool:
        return building.compares(replace(on_gpu, **changed), limits, None, check, None)

    assert compares()
    if warning:
        with pytest.warns(UserWarning, match=outcome):
            building.checked_choice(on_gpu, limits, None, None)
    else:
        building.checked_choice(on_gpu, limits, None, None)
    assert compares() == bool(warning)
    assert compares(check=True) and not compares(check=False)
    assert compares(params=with_weight(MODEL, torch.neg).params), "other weights"
