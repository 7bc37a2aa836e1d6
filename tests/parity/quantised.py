"""Quantised checkpoints of every format beside transformers. `python -m tests.parity.quantised` writes the page.

Each checkpoint has random codes, which `tests/loading/quantisation/encoders.py` writes bit by bit with the weights that they stand for.
transformers runs these weights in float64. Where it can, it also reads the quantised checkpoint itself.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import nanovllm as nv
from nanovllm.models.check.compare import text_batch
from nanovllm.testing.models import tiny_config
from tests.loading.quantisation.encoders import ENCODERS
from tests.loading.quantisation.test_formats import SIZES, folders

PROMPTS, REPLY = (1, 8, 33, 60), 32  # tokens
LEAST = 1e-4  # of a bound
ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
HEAD = """\
# Quantised checkpoints beside transformers
Each format that `load_model` reads, on a small Qwen3 of random codes, in float32 on a CPU. The command is
```
make parity
```
- **logits**: the largest difference of our float32 logits to those of transformers in float64, which runs the weights that the codes stand
  for. A reference of some twenty lines of numpy for each format says what these are; it reads no code of ours
  (`tests/loading/quantisation/encoders.py`).
- **transformers' reader**: the same difference for transformers in float32, reading the quantised checkpoint itself with compressed-tensors
  0.20. A dash: it needs other packages for this format (accelerate, gptqmodel or optimum).
- **bound**: three times the difference between transformers' own float32 and float64 runs, and at least 1e-4.
- **greedy**: how many clear tokens of greedy replies agree. A token is clear if transformers' two largest logits differ by more than twice
  the bound.

| format | logits | transformers' reader | bound | greedy |
| --- | --: | --: | --: | --: |
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of a format; `reader` is None where transformers cannot read it."""

    name: str
    logits: float
    reader: float | None
    bound: float
    agreed: int
    clear: int

    @property
    def failures(self) -> list[str]:
        """What is out of bounds."""
        wrong = [f"logits differ by {self.logits:.1e}, bound {self.bound:.1e}"] * (not self.logits <= self.bound)
        wrong += [f"transformers' reader differs by {self.reader}"] * (self.reader is not None and not self.reader <= self.bound)
        return wrong + [f"{self.agreed} of {self.clear} greedy tokens agree"] * (self.agreed < self.clear or not self.clear)


@torch.no_grad()
def measure(name: str) -> Row:
    """Measure a format of `ENCODERS`."""
    with tempfile.TemporaryDirectory() as made:
        quantised, plain = folders(Path(made), ENCODERS[name], tiny_config(**SIZES))
        model = nv.load_model(quantised, "cpu", "float32", tokenizer=False)
        exact = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64, attn_implementation="eager").eval()
        rounded = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
        reader = None
        if name.startswith("compressed") and find_spec("compressed_tensors"):
            config = json.loads((quantised / "config.json").read_text())
            config["quantization_config"]["quantization_status"] = "compressed"
            if "W8A8" in name:  # without activations it takes such codes for packed ones
                config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = ACTIVATIONS
            (quantised / "config.json").write_text(json.dumps(config))
            reader = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32, attn_implementation="eager").eval()
            for part in reader.modules():
                part.quantization_enabled = False  # or it rounds its decompressed weights again, and activations
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator) for length in PROMPTS]
        apart = theirs = own = 0.0
        for prompt in prompts:
            want = exact(prompt[None]).logits[0]
            got, _ = nv.forward(model.params, None, text_batch(prompt.int(), 16), model.config)
            apart = max(apart, float((got - want).abs().max()))
            own = max(own, float((rounded(prompt[None]).logits[0] - want).abs().max()))
            theirs = theirs if reader is None else max(theirs, float((reader(prompt[None]).logits[0] - want).abs().max()))
        bound, agreed, clear = max(LEAST, 3 * own), 0, 0
        params = nv.SamplingParams(temperature=0.0, max_tokens=REPLY, ignore_eos=True)
        for prompt, out in zip(prompts, nv.LLM(model).generate([p.tolist() for p in prompts], params), strict=True):
            reply = torch.tensor(out.token_ids)
            logits = exact(torch.cat((prompt, reply[:-1]))[None]).logits[0, len(prompt) - 1 :]
            most = logits.topk(2)
            is_clear = most.values[:, 0] - most.values[:, 1] > 2 * bound
            clear += int(is_clear.sum())
            agreed += int((is_clear & (most.indices[:, 0] == reply)).sum())
        return Row(name=name, logits=apart, reader=None if reader is None else theirs, bound=bound, agreed=agreed, clear=clear)


def page(rows: list[Row]) -> str:
    """The Markdown page."""
    lines = [
        f"| {row.name} | {row.logits:.1e} | {'-' if row.reader is None else f'{row.reader:.1e}'} | {row.bound:.1e} | "
        f"{row.agreed} of {row.clear} |"
        for row in rows
    ]
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Run the command; return 1 if a measure is out of bounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.quantised", description="Compare every quantised format.")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="write the page to PREFIX.md instead of printing it")
    options = parser.parse_args()
    rows = [measure(name) for name in ENCODERS]
    if options.out is None:
        print(page(rows), end="")
    else:
        options.out.with_name(options.out.name + ".md").write_text(page(rows), encoding="utf-8")
    wrong = [f"{row.name}: {', '.join(row.failures)}" for row in rows if row.failures]
    print("\n".join([*wrong, f"{len(rows)} formats, {len(wrong)} of them out of bounds"]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
