"""Where a checkpoint lies: revisions in the Hugging Face cache, what a download left out, and downloads only when asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.bench import command as bench
from nanovllm.entrypoints.llm import LLM
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.hub import hub_cache, resolve_folder
from nanovllm.loading.load_model import load_model
from nanovllm.testing.models import save_hf_folder, tiny_config

A, B, C = "ab12" + 36 * "0", "ab13" + 36 * "1", "f" * 40  # commits


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


@pytest.fixture
def repo(cache: Path) -> Path:
    """`org/name` with three empty snapshots and four references."""
    for commit in (A, B, C):
        (cache / "models--org--name" / "snapshots" / commit).mkdir(parents=True)
    for name, commit in (("main", A), ("v1.0", B), ("refs/pr/1", C), ("gone", "0" * 40)):
        reference = cache / "models--org--name" / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    return cache / "models--org--name"


def as_downloaded(repo: Path, commit: str = A, **options: Any) -> Path:
    """A snapshot of links to blobs, as huggingface_hub makes it, and `main` for its commit."""
    snapshot, blobs = save_hf_folder(repo / "snapshots" / commit, tiny_config(), **options), repo / "blobs"
    blobs.mkdir(exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    for file in sorted(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    return snapshot


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, inside in (
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HF_HOME", "hub"),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HUB_CACHE", ""),
    ):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert hub_cache() == tmp_path / variable / inside


def test_a_repository_is_found_by_its_revision(repo: Path) -> None:
    for revision, commit in ((None, A), ("main", A), ("v1.0", B), ("refs/pr/1", C), (C, C), ("ffff", C), (B[:9], B), (A, A)):
        assert resolve_folder("org/name", revision=revision) == (repo / "snapshots" / commit, "org/name")


@pytest.mark.parametrize(
    "revision,told",
    [
        ("v2", f"no revision 'v2'; the cache has gone, main, refs/pr/1, v1.0, {A}, {B}, {C}"),
        ("ab1", "no revision 'ab1'"),
        ("ab1" + "9" * 37, "no revision"),
        ("ffff" + "0" * 36, "no revision"),
        ("gone", f"refs/gone names the snapshot {'0' * 40}, which is missing"),
        ("../refs/main", "no revision"),
        ("/etc/passwd", "no revision"),
        ("refs", "no revision"),
        ("x" * 5000, "no revision"),
        ("a\0b", "no revision"),
    ],
    ids=lambda value: value[:20],
)
def test_a_revision_that_is_not_there_is_told_which_are(revision: str, told: str, repo: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        resolve_folder("org/name", revision=revision)
    assert told in str(raised.value)


def test_a_beginning_of_several_commits_is_refused(repo: Path) -> None:
    (repo / "snapshots" / ("ab12" + 36 * "5")).mkdir()
    with pytest.raises(CheckpointError, match=r"'ab12' is the beginning of several commits: ab120.*, ab125"):
        resolve_folder("org/name", revision="ab12")


def test_without_main_the_only_snapshot_is_taken(repo: Path) -> None:
    (repo / "refs" / "main").unlink()
    with pytest.raises(CheckpointError, match=f"no refs/main; name a revision .*refs/pr/1, v1.0, {A}"):
        resolve_folder("org/name")
    for commit in (A, B):
        (repo / "snapshots" / commit).rmdir()
    assert resolve_folder("org/name")[0].name == C
    with pytest.raises(CheckpointError, match="no revision 'main'"):
        resolve_folder("org/name", revision="main")


NEITHER = "is neither a folder nor a repository in the Hugging Face cache .*"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("org/other", NEITHER + "; download=True, or --download, fetches it from the Hub"),
        *((name, NEITHER + "; names on the Hub usually have the form org/name") for name in ("gpt2", "x" * 5000, "a\0b")),
        *((name, NEITHER + "; did you mean 'tiny', the packaged model[?]") for name in ("tinny", "Tiny")),
        *((name, "no such folder: ") for name in ("/nowhere", "./org", "../etc", "~nobody-at-all/x", "a/b/c", "")),
        (__file__, "is a file: give its folder"),
    ],
    ids=lambda value: ascii(value)[:20],
)
@pytest.mark.usefixtures("repo")
def test_what_is_no_folder_and_not_cached_is_refused(name: str, told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as raised:
        load_model(name, device="cpu")
    assert ("--download" in str(raised.value)) == (name == "org/other")


@pytest.mark.usefixtures("untyped")
def test_a_model_is_named_by_a_path_and_a_revision_by_text(tmp_path: Path) -> None:
    for bad in (3, None, b"tiny", ["tiny"]):
        with pytest.raises(InvalidRequestError, match="path or repository"):
            load_model(bad)  # pyright: ignore[reportArgumentType]
    for bad in ({"revision": 3}, {"revision": ""}, {"download": 1}, {"download": None}):
        with pytest.raises(InvalidRequestError, match=next(iter(bad))):
            load_model("org/name", **bad)
    for folder in (tmp_path, "tiny"):
        with pytest.raises(InvalidRequestError, match=r"revision='main': .*only repositories have revisions"):
            load_model(folder, revision="main")


# what a download left out of a snapshot of three shards, and what the message names
PARTIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "config": (lambda snapshot: (snapshot / "config.json").unlink(), "config.json"),
    "shard": (lambda snapshot: (snapshot / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetensors"),
    "all weights": (lambda snapshot: [path.unlink() for path in snapshot.glob("model*")], "model.safetensors"),
    "all shards": (lambda snapshot: [path.unlink() for path in snapshot.glob("model-*")], "model-00001-of-00003.safetensors"),
    "end of a shard's link": (
        lambda snapshot: (snapshot / "model-00003-of-00003.safetensors").resolve().unlink(),
        "model-00003-of-00003.safetensors",
    ),
    "end of the config's link": (lambda snapshot: (snapshot / "config.json").resolve().unlink(), "config.json"),
    "end of the index's link": (
        lambda snapshot: (snapshot / "model.safetensors.index.json").resolve().unlink(),
        "model.safetensors.index.json",
    ),
    "end of the tokenizer's link": (lambda snapshot: (snapshot / "tokenizer.json").resolve().unlink(), "tokenizer.json"),
}


@pytest.mark.parametrize("fault", PARTIAL)
def test_a_partial_download_is_told_with_the_file(fault: str, cache: Path) -> None:
    snapshot = as_downloaded(cache / "models--org--name", num_shards=3)
    (snapshot / "README.md").symlink_to("../../blobs/never-fetched")
    assert load_model("org/name", device="cpu").name == "org/name"
    spoil, named = PARTIAL[fault]
    spoil(snapshot)
    with pytest.raises(CheckpointError, match=f"{A}: lacks {named}; the repository was not downloaded whole"):
        load_model("org/name", device="cpu")


def test_a_repository_of_pickles_is_told_so(cache: Path) -> None:
    snapshot = as_downloaded(cache / "models--org--name")
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only pickle files"):
        load_model("org/name", device="cpu")


class Hub:
    """In the place of `huggingface_hub.snapshot_download`: what it was asked, and a cache that it fills."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Exception | None = None) -> None:
        self.fails, self.asked = fails, []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, repo_id: str, **options: Any) -> str:
        self.asked.append({"repo_id": repo_id, **options})
        if self.fails is not None:
            raise self.fails
        repo = options["cache_dir"] / f"models--{repo_id.replace('/', '--')}"
        return str(repo / "snapshots" / A if repo.exists() else as_downloaded(repo))


def test_a_download_happens_only_when_asked(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, folder = Hub(monkeypatch), save_hf_folder(tmp_path / "folder", tiny_config())
    with pytest.raises(CheckpointError, match="neither a folder nor"):
        load_model("org/name", device="cpu")
    for here in (folder, "tiny"):
        load_model(here, device="cpu", download=True)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model("/nowhere/at/all", device="cpu", download=True)
    assert not hub.asked
    assert load_model("org/name", device="cpu", download=True, revision="v1.0").name == "org/name"
    (asked,) = hub.asked
    assert (asked["repo_id"], asked["revision"], asked["cache_dir"]) == ("org/name", "v1.0", cache)
    load_model("org/name", device="cpu")  # what was downloaded is there afterwards
    assert len(hub.asked) == 1


FILES = "config.json generation_config.json tokenizer.json tokenizer.model merges.txt vocab.json chat_template.jinja"
FILES += " additional_chat_templates/tool_use.jinja model.safetensors.index.json model-00001-of-00002.safetensors"
LEFT = "pytorch_model.bin model.gguf README.md original/consolidated.00.pth consolidated.safetensors onnx/config.json"
LEFT += " original/tokenizer.model fp16/model.safetensors"


@pytest.mark.usefixtures("cache")
def test_what_is_downloaded_of_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    for with_code, code in ((False, []), (True, ["modeling_mine.py"])):
        resolve_folder(f"org/code-{with_code}", download=True, with_code=with_code)
        asked = hub.asked[-1]
        every = [*FILES.split(), *LEFT.split(), "modeling_mine.py"]
        chosen = filter_repo_objects(every, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
        assert list(chosen) == [*FILES.split(), *code]


def refusal(kind: type[Exception], message: str) -> Exception:
    error = kind.__new__(kind)  # these want the response of a server
    Exception.__init__(error, message)
    return error


@pytest.mark.parametrize(
    "error",
    [
        refusal(GatedRepoError, "Access to model org/name is restricted.\n Ask for it."),
        refusal(RepositoryNotFoundError, "404: no such repository"),
        OSError("the disk is full"),
        ValueError("Repo id must be in the form"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.usefixtures("cache")
def test_a_download_that_fails_tells_the_repository_and_the_reason(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, error)
    told = f"org/name at v1 could not be downloaded: {type(error).__name__}: .*{str(error).split()[-1]}"
    with pytest.raises(CheckpointError, match=told) as raised:
        load_model("org/name", device="cpu", download=True, revision="v1")
    assert "\n" not in str(raised.value)


def test_without_a_network_one_line_tells_the_host_and_the_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    http = httpx.ConnectError("[Errno 111] Connection refused")
    outer = OSError("An error happened\nwhile trying to locate the files. " * 9)
    http.__context__, outer.__cause__ = refused, http
    Hub(monkeypatch, outer)
    with pytest.raises(CheckpointError) as raised:
        load_model("org/name", device="cpu", download=True)
    told = "the connection to huggingface.co for org/name failed: Connection refused; check the network, or use a model of the cache"
    assert str(raised.value) == told and raised.value.__cause__ is outer
    Hub(monkeypatch, httpx.ReadTimeout(""))
    with pytest.raises(
        CheckpointError, match=r"the connection to huggingface\.co for org/name at v1 failed: ReadTimeout; check the network"
    ):
        load_model("org/name", device="cpu", download=True, revision="v1")


def test_offline_a_download_is_what_the_cache_has(cache: Path) -> None:
    """huggingface_hub itself, told by `HF_HUB_OFFLINE` to leave the network alone."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    with pytest.raises(CheckpointError, match=r"org/name could not be downloaded: .*HF_HUB_OFFLINE"):
        load_model("org/name", device="cpu", download=True)


def test_a_shell_and_the_command_line_pass_the_revision_on(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    hub = Hub(monkeypatch)
    llm = LLM("org/name", device="cpu", num_pages=8, revision="v1", download=True)
    for more in ({"revision": "v1"}, {"download": True}):
        with pytest.raises(InvalidRequestError, match="fp8_activations to load_model"):
            LLM(llm.model, **more)
    options = ["--model", "org/name", "--device", "cpu", "--revision", "v2", "--download", "--max-tokens", "1"]
    assert cli.main(["generate", *options, "x"]) == 0
    assert [(asked["repo_id"], asked["revision"]) for asked in hub.asked] == [("org/name", "v1"), ("org/name", "v2")]
    assert cli.main(["generate", "--model", "org/name", "--revision", "v3", "x"]) == 2
    assert cli.main(["check", "org/name", "--revision", "v3"]) == 2
    assert capsys.readouterr().err.count("no revision 'v3'") == 2
    for command in (["check"], ["profile", "--device", "cpu", "--model"]):
        assert cli.main([*command, "qwen3-0.6b", "--revision", "v3"]) == 2
        assert "has random weights and no revisions" in capsys.readouterr().err


def test_a_measurement_downloads_its_model_once(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    hub = Hub(monkeypatch)
    options = ["--model", "org/name", "--device", "cpu", "--revision", "v2", "--download"]
    assert cli.main(["profile", *options, "--steps", "1", "--context", "4"]) == 0
    assert [(asked["repo_id"], asked["revision"]) for asked in hub.asked] == [("org/name", "v2")]
    monkeypatch.setattr(bench, "measure_start", lambda model, place, *_, **__: pytest.fail(place))
    options = ["--model", "org/name", "--device", "cpu", "--revision", A[:6], "--download"]
    with pytest.raises(pytest.fail.Exception, match=f"snapshots/{A}"):
        cli.main(["bench", *options, "--which", "start"])
    assert len(hub.asked) == 2
