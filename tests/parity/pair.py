"""One case as two models: a model of transformers, and the model that `load_model` loads from the folder that transformers saves."""

import copy
import random
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nanovllm.loading.load_model import load_model
from nanovllm.models.model import Model
from nanovllm.testing.models import save_tokenizer
from nanovllm.types import Tensor
from tests.parity.cases import KINDS, Case
from tests.parity.stored import rewrite
from tests.parity.weights import ZEROED, fill

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


@dataclass(frozen=True)
class Pair:
    """Our model (`ours`) and transformers' module (`theirs`), both in float32, and the checkpoint's folder."""

    case: Case
    ours: Model
    theirs: torch.nn.Module
    folder: Path

    def reference(self, rows: list[list[int]], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return transformers' logits of rows of equal length, `[rows, T, V]`.

        If rotation speeds differ for long contexts (longrope), rows are padded to a long context. The padding does not change the logits,
        because a token does not attend to later tokens.
        """
        model = self.wide if dtype == torch.float64 else self.theirs if dtype == torch.float32 else copy.deepcopy(self.theirs).to(dtype)
        ids, count = torch.tensor(rows), len(rows[0])
        if self.case.max_model_len is not None:
            longer = self.case.changes["original_max_position_embeddings"] + 1
            ids = torch.nn.functional.pad(ids, (0, max(0, longer - count)))
        return model(input_ids=ids).logits[:, :count]

    @cached_property
    def wide(self) -> Any:
        """`theirs` in float64, with which both models are compared."""
        return copy.deepcopy(self.theirs).to(torch.float64)

    def load(self, dtype: str) -> Model:
        """Load our model in another dtype."""
        return load_model(self.folder, device="cpu", dtype=dtype, max_model_len=self.case.max_model_len)

    def draw(self, seed: int, *lengths: int) -> list[list[int]]:
        """Sample rows of these lengths from the whole vocabulary; tokens with zero embeddings are more frequent, if there are any."""
        chosen, likely = random.Random(seed), ZEROED if self.case.weights == "zeros" else ()
        vocab = range(self.ours.config.vocab_size)
        return [[chosen.choice(likely if likely and not chosen.randrange(5) else vocab) for _ in range(length)] for length in lengths]


def build(case: Case, folder: Path) -> Pair:
    """Build both models of a case in an empty folder."""
    import transformers

    _, config_name, model_name, _ = KINDS[case.kind]
    config = _config(getattr(transformers, config_name), case)
    theirs = getattr(transformers, model_name)(config).eval()
    fill(theirs, seed=zlib.crc32(f"{case.kind} {case.setting}".encode()), hard=case.weights)
    theirs.save_pretrained(folder)
    save_tokenizer(folder)
    if case.stored:
        rewrite(folder, case.stored)
    return Pair(case, load_model(folder, device="cpu", max_model_len=case.max_model_len), theirs, folder)


def _config(kind: Any, case: Case) -> Any:
    changes: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 256, **copy.deepcopy(dict(case.changes))}
    rope = changes.pop("rope", {})
    if case.kind == "gpt2":
        others = ("num_hidden_layers", "max_position_embeddings", "intermediate_size", "hidden_size")
        changes = {"n_embd": changes["hidden_size"], **{name: value for name, value in changes.items() if name not in others}}
    elif "rope_parameters" not in changes:
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0} | rope
    changes["attn_implementation"] = "eager"
    if case.kind == "gemma3_vision":
        changes = {
            "text_config": changes, "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 299, "boi_token_index": 298,
            "eoi_token_index": 297, "attn_implementation": "eager",
        }  # fmt: skip
    config = kind(**changes)
    config._experts_implementation = "eager"  # the other implementations do not support float64
    return config
