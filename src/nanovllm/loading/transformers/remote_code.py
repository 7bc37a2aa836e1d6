"""Finds the code of a checkpoint, names its files, and runs it; used only with `trust_remote_code`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_relative_import_files
from transformers.utils.hub import cached_file

from nanovllm.errors import CheckpointError
from nanovllm.loading.transformers.found import Found, note


def by_code(folder: Path, auto_map: Mapping[str, Any]) -> Found:
    """Import the config and model classes from a checkpoint's own code, after naming each file on stderr. Raises `CheckpointError`."""
    references = [auto_map.get(name) for name in ("AutoConfig", "AutoModelForCausalLM")]
    named = [reference for reference in references if isinstance(reference, str)]
    if not isinstance(auto_map, Mapping) or not isinstance(references[1], str):
        raise CheckpointError(f"{folder}: auto_map={auto_map!r} names no AutoModelForCausalLM, which a causal language model needs")
    files = tuple(dict.fromkeys(file for reference in named for file in code_files(folder, reference)))
    for file in files:
        note(f"trust_remote_code=True: the checkpoint's own code will be executed: {file}")
    if isinstance(references[0], str):
        config = get_class_from_dynamic_module(references[0], str(folder), local_files_only=True).from_pretrained(str(folder))
    else:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    model = get_class_from_dynamic_module(references[1], str(folder), local_files_only=True)
    if not (isinstance(model, type) and issubclass(model, PreTrainedModel)):
        raise CheckpointError(f"{references[1]} is not a subclass of PreTrainedModel")
    return Found(model=model, config=config, code=files)


def code_files(folder: Path, reference: str) -> list[Path]:
    """The files that run for `file.Class`, or for `org/repository--file.Class`, whose files come from the Hugging Face cache.

    Raises `CheckpointError` if a file is missing.
    """
    repository, _, local = reference.rpartition("--")
    name = f"{local.partition('.')[0]}.py"
    if repository:
        try:
            first = cached_file(repository, name, local_files_only=True)
        except OSError as error:
            raise CheckpointError(f"auto_map names {name} of {repository}, which is not in the Hugging Face cache") from error
    else:
        first = str(folder / name)
    if first is None or Path(name).name != name or not Path(first).is_file():
        raise CheckpointError(f"auto_map names {reference!r}, and {repository or folder} has no {name}")
    files = [Path(first), *sorted(map(Path, get_relative_import_files(first)))]
    if missing := [file for file in files if not file.is_file()]:
        raise CheckpointError(f"{first} imports {missing[0].name}, which is missing")
    return [file.absolute() for file in files]
