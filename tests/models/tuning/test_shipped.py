"""The tuning files of the package: what lies there is valid and worth its place, and engines use it where the user has no file."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from immutables import Map

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.bench.report import about
from nanovllm.models.fast.cuts import SHIPPED, Cuts, StepCuts
from nanovllm.models.init_params import without_memory
from nanovllm.models.tuning import choose, shipped
from nanovllm.models.tuning.candidates import default_cut, reachable
from nanovllm.models.tuning.file import default_path, file_name, key_of, read_shipped, target_of, write_cuts
from nanovllm.models.tuning.launches import Codes, Machine, codes_of, works
from nanovllm.models.tuning.shipped import FOLDER, shipped_path
from nanovllm.testing.models import random_model, tiny_config
from tools import ship_tuning

H100 = Machine(processors=132, memory=200_000)  # an H200 has as many processors and as much shared memory
MACHINES = {"NVIDIA H100 80GB HBM3": H100, "NVIDIA H200": H100}
FILES = sorted(FOLDER.iterdir())
SMALL = random_model(tiny_config(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64))
STEPS = Map({1: StepCuts(qkv=(8, 2, 0)), 64: StepCuts(gate_up=(0,))})


def model_of(key: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> nv.Model:
    """A model of one layer, without memory, that a file is for. Its sizes are those of a shape that `nanovllm bench` knows."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: key["gpu"])
    dtype = getattr(torch, key["dtype"])
    for config in SHAPES.values():
        if config.moe is not None or any(getattr(config, name, value) != value for name, value in key["shapes"].items()):
            continue
        params = without_memory(replace(config, num_layers=1), dtype)
        (layer,) = params.layers
        for part, how in key["shapes"].get("quantised", {}).items():
            matrix = Codes(**how).matrix(*getattr(params if part == "head" else layer, part).shape)
            params, layer = (replace(params, head=matrix), layer) if part == "head" else (params, replace(layer, **{part: matrix}))
        params = replace(params, layers=(layer,))
        model = replace(SMALL, config=config, params=params, dtype=dtype, device=torch.device("cuda"))
        if target_of(model) == key:
            return model
    raise AssertionError(f"no shape of `nanovllm bench` has the key {key}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_serves_the_model_that_it_is_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile configuration that the kernels cannot run, or the default in another form, is a defect of the file."""
    document = json.loads(path.read_text())
    assert set(document) == {"format", "key", "cuts", "measured"} and set(document["key"]) == {"gpu", "dtype", "shapes"}
    model, machine = model_of(document["key"], monkeypatch), MACHINES[document["key"]["gpu"]]
    assert shipped_path(model) == path
    found = read_shipped(path, model, machine)
    assert not found.default and found.source == f"{path}{SHIPPED}"
    for rows, step in found.steps.items():
        for work in works(model.config, rows, machine, codes_of(model.params)):
            if cut := getattr(step, work.part):
                assert reachable(work, cut, machine) and cut != default_cut(work, machine)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100-SXM4-80GB")
    assert shipped_path(model) is None  # where it was not measured it does not apply


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_tile_configuration_saved_more_than_noise(path: Path) -> None:
    document = json.loads(path.read_text())
    assert path.read_text() == ship_tuning.text(document) and path.name == file_name(document["key"])
    saved = {(str(line["rows"]), line["part"]): 1 - line["chosen_us"] / line["default_us"] for line in document["measured"]}
    assert set(saved) == {(rows, part) for rows, step in document["cuts"].items() for part in step}
    assert all(each >= ship_tuning.LEAST for each in saved.values()) and not any(part == "attend" for _, part in saved)


def test_the_tool_leaves_out_noise_and_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"part": "layer", "rows": 64, "default_us": 100.0, "chosen_us": 50.0},
        {"part": "attend", "rows": 64, "default_us": 100.0, "chosen_us": 50.0, "cut": [32, 4, 3, 1]},
        {"part": "qkv", "rows": 64, "default_us": 100.0, "chosen_us": 97.5, "cut": [0]},
        {"part": "gate_up", "rows": 64, "default_us": 100.0, "chosen_us": 96.0, "cut": [0], "measured": 3},
        {"part": "o", "rows": 64, "default_us": 100.0, "chosen_us": 90.0, "cut": []},
    ]
    file = tmp_path / "tuned.json"
    write_cuts(file, key_of(SMALL), Map({64: StepCuts(attend=(32, 4, 3, 1), qkv=(0,), gate_up=(0,))}), lines)
    monkeypatch.setattr(ship_tuning, "FOLDER", tmp_path / "tuning")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "tuning")
    monkeypatch.setattr("sys.argv", ["ship_tuning.py", str(file)])
    ship_tuning.main()
    made = shipped_path(SMALL)
    assert made is not None and list((tmp_path / "tuning").iterdir()) == [made]
    assert json.loads(made.read_text())["measured"] == [{"part": "gate_up", "rows": 64, "default_us": 100.0, "chosen_us": 96.0}]
    assert read_shipped(made, SMALL, H100) == Cuts(steps=Map({64: StepCuts(gate_up=(0,))}), source=f"{made}{SHIPPED}")


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that the package has for `SMALL`, as if the kernels ran on this machine; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choose.fused, "serves", lambda params, config: True)
    monkeypatch.setattr(choose, "machine_of", lambda model: H100)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    path = tmp_path / file_name(target_of(SMALL))
    write_cuts(path, target_of(SMALL), STEPS, [])
    return path


def test_it_serves_where_the_user_has_no_file(file: Path) -> None:
    found = Cuts(steps=STEPS, source=f"{file} (shipped with nanovllm)")
    assert choose.cuts_for(SMALL, None) == found
    assert choose.cuts_for(SMALL, False) is None
    with pytest.raises(nv.TuningFileError, match="no tuning file in the user's cache"):
        choose.cuts_for(SMALL, True)
    mine, other = default_path(key_of(SMALL)), Map({64: StepCuts(o=(32, 64, 64, 3, 2, 4))})
    mine.parent.mkdir(parents=True)
    write_cuts(mine, key_of(SMALL), other, [])
    for tuning in (None, True, mine):
        assert choose.cuts_for(SMALL, tuning) == Cuts(steps=other, source=str(mine))
    write_cuts(mine, key_of(SMALL), Map(), [])  # nothing was faster than the defaults
    assert choose.cuts_for(SMALL, None) is None


def test_versions_and_sources_do_not_switch_it_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = choose.cuts_for(SMALL, None)
    assert before is not None
    monkeypatch.setattr("nanovllm.models.tuning.file._version", lambda name: "another")
    monkeypatch.setattr("nanovllm.models.tuning.file._sources", lambda names: "others")
    assert choose.cuts_for(SMALL, None) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose.cuts_for(random_model(SMALL.config, dtype="bfloat16"), None) is None


def edited(change: Callable[[dict[str, Any]], object], path: Path) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d["cuts"]["1"].update(qkv=[3, 2, 0]), "qkv of 1 rows cannot use the tile configuration"),
        (lambda d: d["key"].update(gpu="another"), "measured for another gpu"),
        (lambda d: d.pop("cuts"), "the object `cuts` is missing"),
    ],
)
def test_a_damaged_one_is_warned_of_and_the_defaults_serve(change: Callable[[dict[str, Any]], object], why: str, file: Path) -> None:
    edited(change, file)
    with pytest.warns(UserWarning, match=f"{why}.*; the default tile configurations are used"):
        assert choose.cuts_for(SMALL, None) is None


def test_reports_say_that_it_is_the_shipped_file(file: Path) -> None:
    cuts = choose.cuts_for(SMALL, None)
    assert cuts is not None
    run = {"model": "small", "dtype": "float32", "gpu": "a card", "cpu": None, "commit": "1234567"}
    told = about(run | {"tuning": Path(cuts.source).name})
    assert told == "small, float32, a card, commit 1234567, tuned by the shipped file"
    assert about(run | {"tuning": "tuning-mine.json"}).endswith("commit 1234567, tuned")
