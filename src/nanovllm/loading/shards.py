"""`Shards`: tensors written as a checkpoint's safetensors files, one file after the other, with the names that Hugging Face's tools use."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from safetensors.torch import save_file

from nanovllm.loading.safetensors_headers import INDEX, SINGLE
from nanovllm.types import Tensor

SHARD = 1 << 30  # bytes after which a file ends


class Shards:
    """The files of a checkpoint's tensors. The host holds the tensors of one file at a time.

    Attributes:
        size: Bytes of all tensors so far.
    """

    def __init__(self, folder: Path):
        self.size, self._folder, self._part, self._places = 0, folder, dict[str, Tensor](), dict[str, str]()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors, and write a file if it is full."""
        self._part |= tensors
        self.size += sum(tensor.nbytes for tensor in tensors.values())
        if sum(tensor.nbytes for tensor in self._part.values()) >= SHARD:
            self._write()

    def end(self) -> None:
        """Write the rest, and name the files: `model.safetensors` if there is one, otherwise numbered shards, with an index."""
        self._write()
        files = list(dict.fromkeys(self._places.values()))
        if len(files) == 1:
            (self._folder / files[0]).replace(self._folder / SINGLE)
            return
        names = {file: f"model-{number:05}-of-{len(files):05}.safetensors" for number, file in enumerate(files, 1)}
        for file, name in names.items():
            (self._folder / file).replace(self._folder / name)
        self._places = {tensor: names[file] for tensor, file in self._places.items()}
        index = {"metadata": {"total_size": self.size}, "weight_map": self._places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        if self._part:
            file = f"model-{len(set(self._places.values())) + 1:05}.safetensors"
            save_file(self._part, self._folder / file, metadata={"format": "pt"})
            (self._folder / file).chmod(_usual_mode(self._folder))  # safetensors makes files that only their owner can read
            self._places |= dict.fromkeys(self._part, file)
            self._part = {}


def _usual_mode(folder: Path) -> int:
    """The permissions of a new file, which the process's mask decides. Reading the mask would change it for a moment."""
    with NamedTemporaryFile(dir=folder, prefix=".mode-") as taken:
        probe = Path(f"{taken.name}-probe")
        probe.touch()
        mode = probe.stat().st_mode & 0o777
        probe.unlink()
        return mode
