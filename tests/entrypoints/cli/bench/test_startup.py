"""From the start of a process to its first token: what is written to be loaded, what is refused, and that nothing is left behind."""

import json
import os
import signal
import tempfile
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import nanovllm as nv
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench import command, report
from nanovllm.entrypoints.cli.bench import startup as start
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_model, random_weights
from nanovllm.entrypoints.cli.bench.workloads import WORKLOADS
from nanovllm.loading import shards
from nanovllm.loading.weights import save_params
from nanovllm.models.common.hf_config import config_to_hf
from nanovllm.models.init_params import num_params
from nanovllm.models.registry import REGISTRY
from nanovllm.testing.models import tiny_config

SMALL = tiny_config(max_position_embeddings=300, dtype="bfloat16")
WHERE = ["--model", "small", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of random weights that `bench` knows, and a folder for temporary files that can be looked into."""
    monkeypatch.setitem(SHAPES, "small", SMALL)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.mark.parametrize("architecture", REGISTRY)
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_is_loaded(architecture: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied, dtype="bfloat16")
    model = random_model("small", config, device="cpu", dtype="bfloat16")
    monkeypatch.setattr(shards, "SHARD", 10_000)
    save_params(model.params, config, tmp_path, torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(REGISTRY[architecture].config_to_hf(config)))
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2 and sum(f.stat().st_size for f in files) == pytest.approx(2 * num_params(config), rel=0.1)
    loaded = nv.load_model(tmp_path, device="cpu", dtype="bfloat16", tokenizer=False)
    assert loaded.config == config
    for a, b in zip(pytree.tree_leaves(model.params), pytree.tree_leaves(loaded.params), strict=True):
        assert a is b is None or torch.equal(a, b)


def test_a_folder_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    model = random_model("small", SMALL, device="cpu")
    save_params(model.params, SMALL, tmp_path, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(SMALL)))
    with pytest.raises(nv.CheckpointError, match="no tokenizer"):
        nv.load_model(tmp_path, device="cpu")
    loaded, limit = nv.load_model(tmp_path, device="cpu", tokenizer=False), nv.SamplingParams(temperature=0, max_tokens=5)
    replies = [nv.generate(one, nv.init_state(one, num_pages=8), [1, 2, 3], limit)[1].token_ids for one in (model, loaded)]
    assert loaded.tokenizer is None and replies[0] == replies[1] and len(replies[0]) == 5
    with pytest.raises(nv.InvalidRequestError, match="tokenizer"):
        nv.prefill(loaded, nv.init_state(loaded, num_pages=8), "text")


def test_whether_there_is_a_tokenizer_is_true_or_false(untyped: None) -> None:
    with pytest.raises(nv.InvalidRequestError, match="tokenizer=None must be True or False"):
        nv.load_model("tiny", tokenizer=None)  # pyright: ignore[reportArgumentType]


def test_a_start_is_measured_in_a_process_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--which", "start", *WHERE, "--output", str(tmp_path / "run.json")]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    parts = result["start"]
    assert result["start_s"] == pytest.approx(sum(parts.values())) and "unfinished" not in result
    assert set(parts) == {"imports_s", "weights_s", "engine_s", "first_token_s"} and min(parts.values()) >= 0
    assert 0.3 < parts["imports_s"] < 60  # torch is in it
    assert f"{result['start_s']:,.2f}" in capsys.readouterr().out
    (head, cells), *_ = [(head, rows[0]) for _, head, rows in report.sections(result | {"peers": {"other": {"start_s": 21.9}, "none": {}}})]
    assert head[-1] == "other" and cells[-1] == "21.9" and len(head) == len(cells)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_bare_start_has_empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in start.CACHES:
        monkeypatch.setenv(name, str(tmp_path / "mine"))
    empty = f"import os; assert '/mine' not in str(os.environ) and not any(os.listdir(os.environ[name]) for name in {start.CACHES})\n"
    monkeypatch.setattr(start, "PROGRAM", empty + start.PROGRAM)
    assert cli.main(["bench", "--which", "bare", *WHERE, "--output", str(tmp_path / "run.json")]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["bare_start_s"] == pytest.approx(sum(result["bare_start"].values())) and "start_s" not in result
    assert "with empty caches" in capsys.readouterr().out
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_second_start_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def fake(model: nv.Model, folder: Path, limits: Any, how: Any, environment: Mapping[str, str]) -> start.Start:
        assert not limits and not how and (folder / "config.json").is_file()
        assert "PYTHONDONTWRITEBYTECODE" not in environment and Path(environment["PYTHONPYCACHEPREFIX"]).is_dir()
        folders.append(folder)
        return start.Start(imports_s=float(len(folders)), weights_s=0.0, engine_s=0.0, first_token_s=0.0)

    monkeypatch.setattr(start, "_run", fake)
    assert start.measure_start(random_weights("small", device="cpu"), "small").start_s == 2
    assert folders[0] == folders[1] and not folders[0].exists()
    folders.clear()
    start.measure_start(nv.load_model("tiny", device="cpu"), "tiny")
    assert folders[0] == folders[1] and (folders[0] / "tokenizer.json").is_file()  # the folder itself, nothing written


def test_a_process_that_is_told_to_end_leaves_no_weights_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(start, "_run", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        start.measure_start(random_weights("small", device="cpu"), "small")
    assert list((tmp_path / "temporary").iterdir()) == [] and signal.getsignal(signal.SIGTERM) is before


def test_a_start_that_fails_is_left_out_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "PROGRAM", "raise MemoryError('no room for another')")
    assert cli.main(["bench", "--which", "start,b8", *WHERE, "--repeats", "1", "--json"]) == 2  # b8 is too long for this model
    capsys.readouterr()
    assert cli.main(["bench", "--which", "start", *WHERE, "--json"]) == 0
    captured = capsys.readouterr()
    (left,) = json.loads(captured.out)["left_out"]
    assert left["workload"] == "start" and left["why"].endswith("before its first token: MemoryError: no room for another")
    assert f"left out: start ({left['why']})" in captured.err and list((tmp_path / "temporary").iterdir()) == []
    monkeypatch.setattr(start, "save_params", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(start.StartError, match=r"could not be written to .*No space left"):
        start.measure_start(random_weights("small", device="cpu"), "small")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("given", [None, False, True, Path("/no/such file.json")])
def test_a_start_is_by_the_cuts_that_were_asked_for(given: Path | bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of the fresh process is made with the same option."""
    told = "class Told(Exception): pass\n\ndef tell(model, **limits): raise Told(limits)\n\nnv.init_state = tell\n"
    monkeypatch.setattr(start, "PROGRAM", start.PROGRAM.replace("marks = [began", told + "marks = [began"))
    with pytest.raises(start.StartError) as error:
        start.measure_start(nv.load_model("tiny", device="cpu"), "tiny", {"tuning": given, "kv_dtype": "fp8"})
    limits = {"tuning": str(given) if isinstance(given, Path) else given, "kv_dtype": "fp8"}
    assert str(error.value).endswith(f"Told: {limits}")


def test_the_option_reaches_the_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def fake(model: nv.Model, name: str, limits: Mapping[str, Any], how: Mapping[str, Any], *, bare: bool) -> start.Start:
        assert how == {"quantization": None, "quantize_head": False, "fp8_activations": False}
        seen.append((*limits.values(), bare))
        raise start.StartError("enough")

    monkeypatch.setattr(command, "measure_start", fake)
    for more in ([], ["--tuning", "off", "--kv-dtype", "fp8"]):
        assert cli.main(["bench", "--which", "start,bare", *WHERE, *more]) == 0
    assert seen == [(None, None, False), (None, None, True), (False, "fp8", False), (False, "fp8", True)]
    assert "enough" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["small", "tiny"])
def test_the_new_process_rounds_weights_as_the_run_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are written to a folder whole, and rounded again by the process that loads them."""
    told = "class Told(Exception): pass\n\ndef tell(model, **_): raise Told(model.quantization)\n\nnv.init_state = tell\n"
    monkeypatch.setattr(start, "PROGRAM", start.PROGRAM.replace("marks = [began", told + "marks = [began"))
    how: dict[str, Any] = {"quantization": "int8", "quantize_head": True}
    model = nv.load_model("tiny", device="cpu", **how) if name == "tiny" else random_weights(name, device="cpu", **how)
    with pytest.raises(start.StartError) as error:
        start.measure_start(model, name, {}, how)
    assert str(error.value).endswith("Told: int8 with a scale per row, rounded while loading, the head too")


def test_a_start_that_does_not_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PROGRAM", "import time\ntime.sleep(60)")
    monkeypatch.setattr(start, "TIMEOUT", 0.2)
    with pytest.raises(start.StartError, match=r"no token within 0\.2 s"):
        start.measure_start(nv.load_model("tiny", device="cpu"), "tiny")


def test_a_disk_without_room_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    needed = 2 * num_params(SHAPES["qwen3-8b"]) + start.SPARE
    assert 16.3e9 < needed < 16.8e9
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: usage(needed))
    assert command.find_workloads(None, "qwen3-8b", cuda=True) == (list(WORKLOADS), [])
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: usage(needed - 1))
    which, (left, bare) = command.find_workloads(None, "qwen3-8b", cuda=True)
    assert which == [name for name in WORKLOADS if name not in ("start", "bare")] and left["workload"] == "start"
    assert bare == left | {"workload": "bare"}
    assert left["why"].startswith("its weights take 16.4 GB of disk, ") and "has 16.6 GB free; set TMPDIR" in left["why"]
    with pytest.raises(nv.InvalidRequestError, match="the workload 'start' cannot be run: its weights take"):
        command.find_workloads("start", "qwen3-8b", cuda=True)
    monkeypatch.setattr(start.shutil, "disk_usage", lambda _: usage(0))
    assert command.find_workloads("start", "tiny", cuda=False) == (["start"], [])  # it is on disk already
