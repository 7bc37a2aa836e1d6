"""The file of a tuning run: round trips, damage, files of others, several writers; and which of them an engine reads."""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

import nanovllm as nv
from nanovllm.engine import init_state as init
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.tune import command
from nanovllm.entrypoints.cli.tune.kernel_search import Unfit
from nanovllm.entrypoints.cli.tune.layer_search import Bench
from nanovllm.executor import build_executor as building
from nanovllm.executor.eager import EagerExecutor
from nanovllm.loading.quantisation.rounding import Rounding, rounded_params
from nanovllm.models.check import examine
from nanovllm.models.fast.choice import FastChoice, all_fast
from nanovllm.models.fast.cuts import Cuts, StepCuts
from nanovllm.models.tuning import choose as use
from nanovllm.models.tuning.candidates import default_cut, neighbours
from nanovllm.models.tuning.file import LARGEST, default_path, key_of, read_cuts, read_run, write_cuts
from nanovllm.models.tuning.launches import Machine, works
from nanovllm.ops.compile_ahead import FirstStart
from nanovllm.ops.cuts import CutError
from nanovllm.ops.linear.quantise import KINDS
from nanovllm.state.kv_cache import init_kv
from nanovllm.testing.models import random_model, tiny_config

H200 = Machine(processors=132, memory=200_000)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
MODEL = random_model(tiny_config(**SIZES))
STEPS = Map({1: StepCuts(qkv=(8, 2, 0), head=(16, 4, 0)), 64: StepCuts(o=(32, 64, 64, 3, 2, 4), gate_up=(0,), attend=(32, 4, 3, 1))})


def written(path: Path, steps: Map[int, StepCuts] = STEPS) -> dict[str, Any]:
    write_cuts(path, key_of(MODEL), steps, [{"part": "qkv", "rows": 1}])
    return json.loads(path.read_text())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cuts.json"
    document = written(path)
    assert read_cuts(path, MODEL, H200) == Cuts(steps=STEPS, source=str(path))
    assert document["measured"] == [{"part": "qkv", "rows": 1}]
    assert set(document["key"]) == {"gpu", "dtype", "shapes", "versions", "kernels"}
    assert list(tmp_path.iterdir()) == [path]


@given(st.lists(st.integers(1, 300), max_size=4), st.data())
def test_any_cuts_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[int], data: st.DataObject) -> None:
    steps = {}
    for count in rows:
        cuts = {work.part: neighbours(work, default_cut(work, H200), H200) for work in works(MODEL.config, count, H200)}
        steps[count] = StepCuts(**{part: data.draw(st.sampled_from(some)) for part, some in cuts.items() if some})
    path = tmp_path_factory.mktemp("file") / "cuts.json"
    written(path, Map(steps))
    assert read_cuts(path, MODEL, H200).steps == Map(steps)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], bytes]:
    def edit(document: dict[str, Any]) -> bytes:
        return json.dumps(document if (other := change(document)) is None else other).encode()

    return edit


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "empty": (lambda d: b"", "not JSON"),
    "truncated": (lambda d: json.dumps(d).encode()[:-9], "not JSON"),
    "not text": (lambda d: b"\x80\x04\x95\xff", "not JSON"),
    "deep": (lambda d: b"[" * 100_000, "not JSON"),
    "large": (lambda d: b" " * (LARGEST + 1), "larger than any tuning file"),
    "a list": (edited(lambda d: [d]), "a list, so it is not a tuning file"),
    "another format": (edited(lambda d: d | {"format": 2}), "format 2, but this version reads format 1"),
    "no key": (edited(lambda d: d.pop("key") and None), "the object `key` is missing"),
    "another GPU": (edited(lambda d: d["key"].update(gpu="NVIDIA A100")), 'another gpu: "NVIDIA A100", here it is "cpu"'),
    "another dtype": (edited(lambda d: d["key"].update(dtype="float16")), "another dtype"),
    "another model": (edited(lambda d: d["key"]["shapes"].update(hidden_size=512)), "another shapes"),
    "another torch": (edited(lambda d: d["key"]["versions"].update(torch="2.0")), "another versions"),
    "another kernel": (edited(lambda d: d["key"].update(kernels="0" * 16)), "another kernels"),
    "no cuts": (edited(lambda d: d.pop("cuts") and None), "the object `cuts` is missing"),
    "rows that are none": (edited(lambda d: d["cuts"].update({"0": {}})), "'0' is not a number of rows"),
    "rows in words": (edited(lambda d: d["cuts"].update({"one": {}})), "'one' is not a number of rows"),
    "a step that is none": (edited(lambda d: d["cuts"].update({"1": [1]})), "cuts of 1 rows"),
    "an unknown part": (edited(lambda d: d["cuts"]["1"].update(embed=[1, 1, 0])), "embed of 1 rows cannot use the tile configuration"),
    "a part that is not run": (edited(lambda d: d["cuts"]["64"].update(head=[1, 1, 0])), "head of 64 rows cannot use the tile"),
    "a cut that does not fit": (edited(lambda d: d["cuts"]["1"].update(qkv=[3, 2, 0])), r"qkv of 1 rows cannot use .* \[3, 2, 0\]"),
    "a huge cut": (edited(lambda d: d["cuts"]["1"].update(qkv=[1 << 70, 2, 0])), "qkv of 1 rows cannot use the tile configuration"),
    "a negative cut": (edited(lambda d: d["cuts"]["64"].update(attend=[32, 4, -3, 1])), "attend of 64 rows cannot use the tile"),
    "a cut of fractions": (edited(lambda d: d["cuts"]["1"].update(qkv=[8.0, 2, 0])), "qkv of 1 rows cannot use the tile configuration"),
    "a cut of truths": (edited(lambda d: d["cuts"]["1"].update(qkv=[True, 2, 0])), "qkv of 1 rows cannot use the tile configuration"),
    "a cut in words": (edited(lambda d: d["cuts"]["1"].update(qkv="820")), "qkv of 1 rows cannot use the tile configuration"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_named_and_refused(damage: str, tmp_path: Path) -> None:
    path, (edit, match) = tmp_path / "cuts.json", DAMAGES[damage]
    path.write_bytes(edit(written(path)))
    with pytest.raises(nv.TuningFileError, match=match) as error:
        read_cuts(path, MODEL, H200)
    assert str(error.value).startswith(f"{path}: ") and len(str(error.value)) < 800


def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cuts.json"
    written(path)
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(nv.TuningFileError):
            read_cuts(path, MODEL, H200)


def test_a_file_that_is_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(nv.TuningFileError, match="could not be read"):
            read_cuts(path, MODEL, H200)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(nv.InvalidRequestError, match="could not be written"):
        written(tmp_path / "no folder" / "cuts.json")


def test_the_name_depends_on_all_that_cuts_depend_on() -> None:
    key = key_of(MODEL)
    others = [key | {"gpu": "NVIDIA H200"}, key | {"dtype": "float16"}, key | {"kernels": ""}, key | {"versions": {}}, key | {"shapes": {}}]
    assert len({default_path(one).name for one in (key, *others)}) == 6
    assert default_path(others[0]).name.startswith("tuning-nvidia-h200-float32-")
    assert key_of(random_model(tiny_config("LlamaForCausalLM", **SIZES)))["shapes"] != key["shapes"]  # heads without norms
    assert key_of(random_model(tiny_config(**SIZES, hidden_act="gelu_tanh")))["shapes"] != key["shapes"]
    names = ("LlamaForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM")
    alike = [random_model(tiny_config(name, **SIZES, hidden_act="gelu_tanh"), dtype="bfloat16") for name in names]
    shapes = [key_of(model)["shapes"] for model in alike]
    assert shapes[0] != shapes[1] != shapes[2]  # gains wider than the model, norms behind attention and MLP
    assert key_of(random_model(tiny_config(**SIZES), seed=3)) == key  # other weights of the same shapes


WRITER = """
import json, sys
from pathlib import Path
from immutables import Map
from nanovllm.models.fast.cuts import StepCuts
from nanovllm.models.tuning.file import write_cuts
path, rows, key = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
for _ in range(60):
    write_cuts(path, key, Map({n: StepCuts(qkv=(8, 2, 0)) for n in (1, 2)[:rows]}), [{"filler": "x" * 20_000}])
"""


def test_several_processes_write_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "cuts.json"
    written(path, Map())
    arguments = [[sys.executable, "-c", WRITER, str(path), str(1 + n), json.dumps(key_of(MODEL))] for n in range(2)]
    workers = [subprocess.Popen(one, stderr=subprocess.PIPE, text=True) for one in arguments]
    seen = set()
    while any(worker.poll() is None for worker in workers):
        seen.add(tuple(sorted(read_cuts(path, MODEL, H200).steps)))
    for worker in workers:
        _, said = worker.communicate()
        assert worker.returncode == 0, said
    assert seen <= {(), (1,), (1, 2)} and len(seen) > 1 and tuple(sorted(read_cuts(path, MODEL, H200).steps)) in ((1,), (1, 2))
    assert list(tmp_path.iterdir()) == [path]


# Which file an engine reads


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if the kernels ran on this machine; the cache is a folder of the test's own, and the path of the model's file is returned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(use.fused, "serves", lambda params, config: True)
    monkeypatch.setattr(use, "machine_of", lambda model: H200)
    monkeypatch.setattr(building, "_captures", lambda model, limits, compile: compile is not False)
    monkeypatch.setattr(
        init, "step_bytes_needed", lambda model, limits, compile, choice, cuts, tuning: (0, cuts)
    )  # there is no GPU to measure on
    path = default_path(key_of(MODEL))
    path.parent.mkdir(parents=True)
    return path


def test_the_file_in_the_cache_is_taken_where_it_is(served: Path) -> None:
    assert use.cuts_for(MODEL, None) is None
    with pytest.raises(nv.TuningFileError, match="run `nanovllm tune`"):
        use.cuts_for(MODEL, True)
    written(served)
    for tuning in (None, True, served, str(served)):
        assert use.cuts_for(MODEL, tuning) == Cuts(steps=STEPS, source=str(served))
    assert use.cuts_for(MODEL, False) is None


def test_a_damaged_file_in_the_cache_is_warned_of_and_the_defaults_serve(served: Path) -> None:
    served.write_text("{")
    with pytest.warns(UserWarning, match="not JSON.*the default tile configurations are used") as told:
        assert use.cuts_for(MODEL, None) is None
    assert str(told[0].message).startswith(str(served))
    for tuning in (True, served):
        with pytest.raises(nv.TuningFileError, match="not JSON"):
            use.cuts_for(MODEL, tuning)


@pytest.mark.parametrize("folder", [False, True])
def test_what_others_can_write_is_not_believed(folder: bool, served: Path) -> None:
    written(served)
    (served.parent if folder else served).chmod(0o777 if folder else 0o666)
    with pytest.warns(UserWarning, match="other users can write this file or its folder.*the default tile configurations are used"):
        assert use.cuts_for(MODEL, None) is None
    with pytest.raises(nv.TuningFileError, match="other users can write this file"):
        use.cuts_for(MODEL, True)
    assert use.cuts_for(MODEL, served) is not None  # whoever names it, knows it


def test_what_is_written_is_its_users_alone(served: Path) -> None:
    before = os.umask(0o002)
    try:
        written(served)
    finally:
        os.umask(before)
    assert use.cuts_for(MODEL, None) is not None


def test_quantised_weights_have_files_of_their_own(tmp_path: Path) -> None:
    """Their key names how each matrix is quantised, and their cuts those of other kernels."""
    plain, path = key_of(MODEL), tmp_path / "cuts.json"
    models = {kind: replace(MODEL, params=rounded_params(MODEL.params, Rounding(kind=kind))) for kind in KINDS}
    keys = [plain, *map(key_of, models.values())]
    assert len({default_path(key) for key in keys}) == 4 and "quantised" not in plain["shapes"]
    assert keys[1]["shapes"]["quantised"]["qkv"] == {"kind": "fp8", "group": MODEL.config.hidden_size, "rows": 1, "zeros": False}
    steps = Map({8: StepCuts(qkv=(64, 16, 64, 2, 1, 4))})
    write_cuts(path, keys[1], steps, [])
    assert read_cuts(path, models["fp8"], H200).steps == steps
    for other in (MODEL, models["int8"]):
        with pytest.raises(nv.TuningFileError, match="measured for another"):
            read_cuts(path, other, H200)
    write_cuts(path, keys[1], Map({8: StepCuts(qkv=(1, 2, 3, 4))}), [])
    with pytest.raises(nv.TuningFileError, match="qkv of 8 rows cannot use"):
        read_cuts(path, models["fp8"], H200)


def test_layers_that_are_quantised_in_several_ways_have_no_file(
    served: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels of the first layer are measured: their cuts name kernels that another layer does not run."""
    first, *others = rounded_params(MODEL.params, Rounding(kind="int4")).layers
    for layers in (
        (first, *MODEL.params.layers[1:]),
        (MODEL.params.layers[0], *others),
        (replace(first, o=MODEL.params.layers[0].o), *others),
    ):
        mixed = replace(MODEL, params=replace(MODEL.params, layers=layers))
        assert use.cuts_for(mixed, None) is None
        for tuning in (True, served):
            with pytest.raises(nv.InvalidRequestError, match="quantised alike, unlike those of"):
                use.cuts_for(mixed, tuning)
        monkeypatch.setattr(command, "find_model", lambda options, model=mixed: (model, False))
        monkeypatch.setattr(command, "resolve_device", lambda device: torch.device("cuda"))
        assert cli.main(["tune", "--device", "cuda", "--output", str(served.parent / "new.json")]) == 2
        assert "tune needs layers that are quantised alike" in capsys.readouterr().err


def test_a_file_without_cuts_is_the_defaults(served: Path) -> None:
    for steps in (Map(), Map({1: StepCuts(), 8: StepCuts()})):
        written(served, steps)
        for tuning in (None, True, served):
            assert use.cuts_for(MODEL, tuning) is None


@pytest.mark.parametrize("name", ["~nosuchuser/x.json", "a\0b", "", "\ud800.json"])
def test_what_no_file_is_called_is_refused(name: str, served: Path) -> None:
    with pytest.raises(nv.TuningFileError) as error:
        use.cuts_for(MODEL, name)
    assert (repr(name) if name != "\ud800.json" else name) in str(error.value) and "JSON" not in str(error.value)


def test_kernels_whose_sources_cannot_be_read_have_no_file(
    served: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(served)
    monkeypatch.setattr("nanovllm.models.tuning.file.KERNELS", ("no_such_kernel",))
    for tuning in (True, served):
        with pytest.raises(nv.TuningFileError, match=r"no_such_kernel\.py: the kernels' sources could not be read") as error:
            use.cuts_for(MODEL, tuning)
        assert tuning is True or str(error.value).startswith(f"{served}: ")
    with pytest.warns(UserWarning, match="no_such_kernel.*the default tile configurations are used"):
        assert use.cuts_for(MODEL, None) is None


def test_what_is_no_tuning_is_refused(untyped: None) -> None:
    for wrong in (1, 2.5, ["off"]):
        with pytest.raises(nv.InvalidRequestError, match="must be True, False, None or the path of a file"):
            nv.init_state(MODEL, num_pages=8, tuning=wrong)  # pyright: ignore[reportArgumentType]


def test_on_a_cpu_there_is_nothing_to_cut(tmp_path: Path) -> None:
    for tuning in (None, False):
        assert nv.init_state(MODEL, num_pages=8, tuning=tuning).runtime.cuts is None
    for tuning in (True, tmp_path / "x.json"):
        told = tuning if tuning is True else str(tuning)
        with pytest.raises(nv.InvalidRequestError, match=re.escape(f"tuning={told!r} is for captured steps on a CUDA GPU")):
            nv.LLM(MODEL, num_pages=8, tuning=tuning)


def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an executor would be made with: the choice, and the cuts."""
    made: list[Any] = []
    plain = building.build_executor

    def executor(model: Any, limits: Any, kv: Any, compile: Any, cascade: Any, choice: Any, cuts: Any, *rest: Any) -> Any:
        made.append((choice, cuts))
        return plain(model, limits, kv, False, cascade, choice, cuts, *rest)[0], cuts

    monkeypatch.setattr(init, "build_executor", executor)
    return made


def test_an_engine_takes_the_cuts_and_tells_of_them(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = captured(monkeypatch)
    written(served)
    state = nv.init_state(MODEL, num_pages=8)
    assert made[-1] == (None, state.runtime.cuts) and state.runtime.cuts == Cuts(steps=STEPS, source=str(served))
    assert nv.init_state(MODEL, num_pages=8, tuning=False).runtime.cuts is None
    assert nv.LLM(MODEL, num_pages=8, tuning=served).state.runtime.cuts == state.runtime.cuts
    served.write_text("")
    with pytest.warns(UserWarning, match="the default tile configurations are used"):
        assert nv.init_state(MODEL, num_pages=8).runtime.cuts is None


def test_cuts_that_do_not_keep_the_bound_are_dropped(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the start of an engine sees the kernels by their cuts, and then by the defaults."""
    made, looked = captured(monkeypatch), []
    bad = FastChoice(layers=(False, True, True))

    def choose(model: nv.Model, page_size: int, cuts: Cuts | None = None) -> tuple[FastChoice, str]:
        looked.append(cuts)
        return (all_fast(model.config), "") if cuts is None else (bad, "layer 0 errs")

    monkeypatch.setattr(building, "choose", choose)
    written(served)
    with pytest.warns(UserWarning, match=r"ignoring tuning file .*\.json, using the default tile configurations: with it, .*layer 0 errs"):
        state = nv.init_state(MODEL, num_pages=8, check=True)
    assert made == [(None, None)] and state.runtime.cuts is None and looked == [Cuts(steps=STEPS, source=str(served)), None]
    monkeypatch.setattr(building, "choose", lambda *_: (all_fast(MODEL.config), ""))
    assert nv.init_state(MODEL, num_pages=8, check=True).runtime.cuts is not None


FAILURES = [CutError("cut (3,) does not fit"), *([error("out of\n shared memory") for error in examine.kernel_errors()])]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("where", ["look", "capture"])
def test_cuts_that_no_kernel_can_be_made_by_are_dropped_or_refused(
    failure: Exception, where: str, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped where the file was found, refused where it was asked for; whatever fails by the defaults is not the file's fault."""
    made: list[Cuts | None] = []
    by_default = False

    def make(cuts: Cuts | None) -> None:
        made.append(cuts)
        if cuts is not None or by_default:
            raise failure

    class Graphs(EagerExecutor):
        def __init__(self, model: Any, limits: Any, kv: Any, *, cuts: Cuts | None = None, **_: Any) -> None:
            super().__init__(limits, model.spec.forward)
            if where == "capture":
                make(cuts)

    def start(tuning: Any) -> Any:
        made.clear()
        limits = nv.EngineConfig(num_pages=8, page_size=16, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, seed=0)
        kv = init_kv(MODEL.config, num_pages=8, page_size=16, dtype=MODEL.dtype, device=MODEL.device)
        on_gpu = replace(MODEL, device=torch.device("cuda"))
        cuts = building.tuned_cuts(on_gpu, limits, None, tuning)
        if where == "look":
            return building.checked_choice(on_gpu, limits, cuts, tuning)[1]
        return building.build_executor(on_gpu, limits, kv, None, None, None, cuts, tuning, False, FirstStart(None))[1]

    monkeypatch.setattr("nanovllm.executor.graph_executor.GraphExecutor", Graphs)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(use, "key_of", lambda model: key_of(MODEL))
    monkeypatch.setattr("nanovllm.models.tuning.file.key_of", lambda model: key_of(MODEL))
    monkeypatch.setattr(examine, "fast_path", lambda params, config, cuts: SimpleNamespace(name="fused", cuts=cuts))
    monkeypatch.setattr(examine, "compare", lambda model, fast, *_: make(fast.cuts))
    monkeypatch.setattr(examine, "chosen", lambda *_: all_fast(MODEL.config))
    monkeypatch.setattr(building, "note_passed", lambda *_: None)
    written(served)
    found = Cuts(steps=STEPS, source=str(served))
    why = re.escape(f"{served}: a kernel cannot be built with its tile configurations: {' '.join(str(failure).split())}")
    with pytest.warns(UserWarning, match=f"{why}; the default tile configurations are used"):
        assert start(None) is None
    assert made == [found, None]
    for asked in (True, served, str(served)):
        with pytest.raises(nv.TuningFileError, match=why):
            start(asked)
        assert made == [found]
    assert start(False) is None and made == [None]
    by_default = True
    if where == "capture" or isinstance(failure, CutError):
        with pytest.raises(type(failure)):
            start(False)
    else:
        with pytest.warns(UserWarning, match="the path fused cannot run here"):
            assert start(False) is None


# The command


def test_on_a_cpu_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("nanovllm: error: tune needs a CUDA GPU")
    assert "this device is cpu" in captured.err and captured.err.count("\n") == 1


@pytest.fixture
def tuning(served: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU that is none, on which layers are twice as fast by any cut of qkv as by the default."""

    def measuring(model: nv.Model, recorder: None, group: Any) -> Any:
        return nullcontext(Bench(measure=lambda cuts: (1.0,) if cuts.qkv else (2.0,)))

    monkeypatch.setattr(command, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(command, "find_model", lambda options: (MODEL, "small"))
    monkeypatch.setattr(command, "machine_of", lambda model: H200)
    monkeypatch.setattr(command, "Recorder", lambda device: None)
    monkeypatch.setattr(command, "measuring", measuring)
    monkeypatch.setattr(command, "freeze", lambda: None)
    return served


def test_the_command_prints_a_table_and_writes_the_file(tuning: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--batches", "1,64"]) == 0
    out = capsys.readouterr().out
    assert "2 of 11 kernels have a tile configuration other than the default." in out and f"Written to {tuning}" in out
    (head, *rows) = out.splitlines()[2:16]
    assert head.split() == ["part", "rows", "default", "us", "chosen", "us", "faster", "tiles", "measured", "skipped"]
    for part in ("layer", "qkv"):
        told = [row.split()[:5] for row in rows if row.split()[0] == part]
        assert told == [[part, count, "2.00", "1.00", "50.0%"] for count in ("1", "64")]
    cuts = read_cuts(tuning, MODEL, H200)
    assert set(cuts.steps) == {1, 64} and all(step.qkv and not step.o for step in cuts.steps.values())
    other = tmp_path / "new" / "mine.json"
    assert cli.main(["tune", "--batches", "8", "--json", "--output", str(other)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(other) and [row["part"] for row in told["measured"]] == [
        "layer", "attend", "qkv", "o", "gate_up", "down",
    ]  # fmt: skip
    assert told["measured"] == json.loads(other.read_text())["measured"] and set(read_cuts(other, MODEL, H200).steps) == {8}


def failing(monkeypatch: pytest.MonkeyPatch, *rows: int, error: BaseException | None = None) -> None:
    """Steps of these numbers of rows cannot be measured."""
    plain = command.measuring

    def measuring(model: nv.Model, recorder: None, group: Any) -> Any:
        if group[0].rows in rows:
            raise error or Unfit("no memory for it")
        return plain(model, recorder, group)

    monkeypatch.setattr(command, "measuring", measuring)


def test_a_run_that_measured_nothing_leaves_the_file(
    tuning: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tuning)
    before = tuning.read_bytes()
    failing(monkeypatch, 1, 64)
    assert cli.main(["tune", "--batches", "1,64"]) == 2 and tuning.read_bytes() == before
    assert f"nothing could be measured (no memory for it); {tuning} is unchanged" in capsys.readouterr().err
    tuning.unlink()
    assert cli.main(["tune", "--batches", "1,64"]) == 2 and not tuning.exists()


def test_a_run_that_measured_some_says_so(tuning: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, 64)
    assert cli.main(["tune", "--batches", "8,64"]) == 1
    assert "attend, 64 rows: not measured: no memory for it" in capsys.readouterr().out
    cuts, lines = read_run(tuning, MODEL, H200)
    assert set(cuts.steps) == {8} and {line["rows"] for line in lines if "why" in line} == {64}


def test_a_run_that_is_cut_keeps_what_it_found(tuning: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 64, error=KeyboardInterrupt())
    assert cli.main(["tune", "--batches", "1,8,64"]) == 130
    cuts, lines = read_run(tuning, MODEL, H200)
    assert set(cuts.steps) == {1, 8} and {line["rows"] for line in lines} == {1, 8}


def test_older_cuts_of_what_was_not_measured_stay(tuning: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["tune", "--batches", "1,8"]) == 0
    first, lines = read_run(tuning, MODEL, H200)
    failing(monkeypatch, 1)
    monkeypatch.setattr("nanovllm.entrypoints.cli.tune.sweep.HEAD_MARGIN", 0.5)
    assert cli.main(["tune", "--batches", "1,8,64"]) == 1
    second, more = read_run(tuning, MODEL, H200)
    assert set(second.steps) == {1, 8, 64} and second.at(1) == first.at(1)
    assert [line for line in more if line["rows"] == 1] == [line for line in lines if line["rows"] == 1]
    assert [line["rows"] for line in more] == sorted(line["rows"] for line in more)
    assert len({(line["rows"], line["part"]) for line in more}) == len(more)
    measured = nullcontext(Bench(measure=lambda cuts: (1.0,)))
    monkeypatch.setattr(command, "measuring", lambda *_: measured)
    assert cli.main(["tune", "--batches", "8"]) == 0  # by nothing it is faster now
    assert set(read_cuts(tuning, MODEL, H200).steps) == {1, 64}


@pytest.mark.parametrize("damage", ["key", "mode", "measured", "whole"])
def test_an_older_file_that_is_not_to_be_believed_is_replaced(damage: str, tuning: Path) -> None:
    document = written(tuning)
    if damage == "key":
        document["key"]["gpu"] = "another"
    elif damage == "measured":
        document["measured"] = [{"part": "qkv", "rows": "1"}]
    tuning.write_text(json.dumps(document) if damage != "whole" else "{")
    tuning.chmod(0o666 if damage == "mode" else 0o644)
    assert cli.main(["tune", "--batches", "8"]) == 0
    cuts, lines = read_run(tuning, MODEL, H200)
    assert set(cuts.steps) == {8} and {line["rows"] for line in lines} == {8}


def test_what_the_command_cannot_do_is_told_before_it_measures(
    tuning: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["tune", "--output", str(tmp_path)]) == 2 and "is a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["tune", "--batches", "0"])
    tuning.parent.chmod(0o777)
    assert cli.main(["tune"]) == 2 and "give a file with --output" in capsys.readouterr().err
    tuning.parent.chmod(0o700)
    monkeypatch.setattr(command.fused, "serves", lambda params, config: False)
    assert cli.main(["tune"]) == 2 and "cannot be tuned" in capsys.readouterr().err


def test_bench_records_whether_cuts_were_used(served: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    captured(monkeypatch)
    monkeypatch.setattr("nanovllm.entrypoints.cli.bench.command.find_model", lambda options: (MODEL, "small"))
    monkeypatch.setattr("nanovllm.entrypoints.cli.bench.command.host_time", lambda model, state, size: (state, {}))
    written(served)
    for arguments, source in (([], served.name), (["--tuning", "off"], None), (["--tuning", str(served)], served.name)):
        assert cli.main(["bench", "--device", "cpu", "--which", "host", "--json", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["tuning"] == source


def test_the_cache_folder_is_not_made_by_looking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(use.fused, "serves", lambda params, config: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use.cuts_for(replace(MODEL), None) is None
    assert not os.listdir(tmp_path)


def test_a_user_without_a_home_has_no_file(monkeypatch: pytest.MonkeyPatch, served: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert use.cuts_for(MODEL, None) is None
    with pytest.raises(nv.TuningFileError, match="no tuning file in the user's cache"):
        use.cuts_for(MODEL, True)
