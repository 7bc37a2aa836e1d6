"""Safetensors files: which hold the weights, and every way in which they do not add up is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import CheckpointError
from nanovllm.loading.load_model import load_model
from nanovllm.loading.safetensors_headers import read_headers, weight_files
from nanovllm.testing.models import save_hf_folder, tiny_config

NORM = "model.norm.weight"


def index_of(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def shard(folder: Path, number: int, of: int = 3) -> Path:
    return folder / f"model-{number:05}-of-{of:05}.safetensors"


def edit(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def home(folder: Path, name: str) -> Path:
    return next(path for path in sorted(folder.glob("model-*")) if name in load_file(path))


def other(folder: Path, name: str) -> Path:
    return next(path for path in sorted(folder.glob("model-*")) if name not in load_file(path))


def drop_from_shard(folder: Path) -> None:
    edit(shard(folder, 1), lambda tensors: tensors.pop("lm_head.weight"))


def repeat_in_shards(folder: Path) -> None:
    edit(other(folder, NORM), lambda tensors: tensors.update({NORM: torch.ones(32)}))


def move_to_another_shard(folder: Path) -> None:
    old, new = home(folder, NORM), other(folder, NORM)
    edit(new, lambda tensors: tensors.update({NORM: torch.ones(32)}))
    edit(old, lambda tensors: tensors.pop(NORM))


def repeat_in_index(folder: Path) -> None:
    text = index_of(folder).read_text()
    index_of(folder).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "{shard(folder, 1).name}", '))


def without_index(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index_of(folder).unlink()
        change(folder)

    return apply


# what is wrong: (what is done to a good folder of three shards, what the message names)
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda folder: shard(folder, 2).unlink(), "names the shard model-00002-of-00003.safetensors, which is missing"),
    "index is not JSON": (lambda folder: index_of(folder).write_text("{"), "index.json: not an index"),
    "index without a map": (lambda folder: index_of(folder).write_text("{}"), "index.json: not an index"),
    "index of numbers": (lambda folder: index_of(folder).write_text('{"weight_map": {"a": 1}}'), "index.json: not an index"),
    "index leads out": (lambda folder: index_of(folder).write_text('{"weight_map": {"a": "../x.safetensors"}}'), "not a plain file name"),
    "index too deep": (lambda folder: index_of(folder).write_text("[" * 100000), "index.json: not an index"),
    "tensor gone from its shard": (drop_from_shard, "lacks lm_head.weight"),
    "tensor in two shards": (repeat_in_shards, rf"{NORM}.*model-0000\d-of-00003"),
    "tensor in another shard": (move_to_another_shard, rf"holds {NORM}, which the index places in model-0000\d-of-00003"),
    "tensor twice in the index": (repeat_in_index, f"index.json: {NORM} occurs twice"),
    "tensor not in the index": (
        lambda folder: edit(shard(folder, 1), lambda tensors: tensors.update(extra=torch.ones(2))),
        "holds extra, which the index does not name",
    ),
    "tensor in two shards, no index": (without_index(repeat_in_shards), rf"{NORM} occurs twice, in model-0000\d-of-00003"),
    "missing shard, no index": (
        without_index(lambda folder: shard(folder, 2).unlink()),
        "names ask for the shard model-00002-of-00003.safetensors, which is missing",
    ),
    "missing last shard, no index": (without_index(lambda folder: shard(folder, 3).unlink()), "the shard model-00003-of-00003.safetensors"),
    "shards of two checkpoints": (
        without_index(lambda folder: shard(folder, 1).rename(shard(folder, 1, of=2))),
        "the shards model-00001-of-00002.safetensors and model-00003-of-00003.safetensors cannot be of one",
    ),
    "names without numbers of shards, no index": (
        without_index(lambda folder: [shard(folder, number).rename(folder / f"model-{number:05}.safetensors") for number in (1, 2, 3)]),
        r"model-00001\.safetensors, model-00002\.safetensors, .* have other names, and no model\.safetensors\.index\.json lists them",
    ),
    "shards without end": (
        without_index(lambda folder: shard(folder, 1).rename(folder / f"model-1-of-{'9' * 30}.safetensors")),
        "cannot be of one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_that_do_not_add_up_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    spoil, named = FAULTS[fault]
    folder = save_hf_folder(tmp_path, tiny_config(), num_shards=3)
    spoil(folder)
    with pytest.raises(CheckpointError, match=named):
        load_model(folder, device="cpu")


def test_numbered_shards_need_no_index(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config(), num_shards=3)
    expected = read_headers(folder)
    index_of(folder).unlink()
    assert weight_files(folder) == tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    assert read_headers(folder) == expected


def test_one_shard_of_very_many(tmp_path: Path) -> None:
    (tmp_path / "model-1-of-999999999999.safetensors").touch()
    assert weight_files(tmp_path)[-1] == "model-2-of-999999999999.safetensors"


def in_file(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'


@pytest.mark.parametrize("second", [(0, 4), (4, 8)])
def test_a_tensor_twice_in_one_file_is_named(second: tuple[int, int], tmp_path: Path) -> None:
    header = '{"a":' + ENTRY % (0, 4) + ',"a":' + ENTRY % second + "}"
    (tmp_path / "model.safetensors").write_bytes(in_file(header.encode(), bytes(second[1])))
    with pytest.raises(CheckpointError, match=r"model.safetensors: a occurs twice"):
        read_headers(tmp_path)


@pytest.mark.parametrize("header", [b"[" * 100000, b"[]", b'{"a":3}', b'{"a":{}}', b"\xff", b""], ids=repr)
def test_a_header_of_another_form_is_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(in_file(header, b""))
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_headers(tmp_path)


@pytest.mark.parametrize(("kept", "said"), [(-1, "1 bytes"), (-1000, "1,000 bytes"), (20, "at least [0-9,]+ bytes")])
def test_the_missing_bytes_of_a_truncated_file_are_counted(kept: int, said: str, tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path, tiny_config())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    why = rf"{file}: not a whole safetensors file: {said} are missing: copy or download it again$"
    with pytest.raises(CheckpointError, match=why):
        read_headers(folder)


def test_a_header_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + json.dumps({}).encode())
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_headers(tmp_path)
