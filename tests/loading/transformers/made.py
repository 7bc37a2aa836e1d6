"""Small checkpoints of architectures that have no file in the package, written by transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import nanovllm as nv
from nanovllm.testing.models import save_tokenizer

SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
ROWS = ([3, 7, 11, 200, 5, 9, 9, 14, 250, 31, 77, 8, 41], [90, 4, 5], [3, 7, 11, 200, 5, 9, 9, 14, 60, 61])
GREEDY = nv.SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@dataclass(frozen=True)
class Made:
    """A folder that transformers wrote, and the model that it holds, in float32."""

    folder: Path
    theirs: Any


def save(path: Path, kind: str, changes: dict[str, Any], auto: Any = transformers.AutoModelForCausalLM) -> Made:
    """Random weights, large enough to keep greedy choices apart."""
    sizes = {name: value for name, value in SIZES.items() if name != "pad_token_id" or kind not in ("bart",)}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    torch.manual_seed(0)
    theirs = auto.from_config(config, attn_implementation="eager").eval().float()  # other forms leave soft caps out
    for weight in theirs.parameters():
        weight.add_(torch.randn_like(weight) * 0.15)
    theirs.save_pretrained(path)
    save_tokenizer(path)
    return Made(folder=path, theirs=theirs)


def copied(folder: Path, to: Path) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def greedy(theirs: Any, ids: list[int], count: int) -> list[int]:
    """transformers' choices, without a cache."""
    run = list(ids)
    for _ in range(count):
        run.append(int(theirs(input_ids=torch.tensor([run]), use_cache=False).logits[0, -1].argmax()))
    return run[len(ids) :]
