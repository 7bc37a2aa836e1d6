"""The Markdown page with all measures."""

import platform
from collections.abc import Sequence

import torch

from tests.parity.cases import CASES
from tests.parity.measure import Measures

COMMAND = "make parity"
HEAD = """\
# Parity with transformers
This page compares every architecture with [transformers](https://github.com/huggingface/transformers), also with unusual settings and with
numerically hard weights. The models are small and have random weights. transformers saves them, and `load_model` loads them. This command
writes the page:
```
{command}
```
It ran with Python {python}, torch {torch} and transformers {transformers} on a CPU ({machine}). The measures are in `tests.parity`, and
tests check their bounds. transformers runs with `attn_implementation="eager"`. Its default, `sdpa`, leaves out the soft cap on the
attention scores of Gemma 2.

**Worst of all {count} cases:** {worst}

- **logits**: the largest difference of a float32 logit to transformers' run in float64. Prompts have 1, 8, 33 and 60 tokens, and as many
  tokens as the context. They run in batches, in pieces of 1, 7, 64 and 100 tokens, on pages of 1, 4 and 16 tokens. They are also decoded
  one token at a time.
- **bound**: three times the difference between transformers' own float32 and float64 runs, and at least 1e-4.
- **greedy**: how many clear tokens of greedy replies agree. A token is clear if transformers' two largest logits differ by more than twice
  the bound. Four prompts get replies of 64 tokens in five ways: together, in pieces, on the CPU's decode
  path; the same in plain torch; each alone; one after another on shared pages; with shared pages read once.
- **log-prob.**: the largest difference of a sampled token's log-probability to transformers' in float32. Its limit is twice the bound.
- **bf16 prompts, bf16 decode**: the mean error of our bfloat16 logits, divided by the mean error of transformers' bfloat16 logits. Both are
  measured against transformers' run in float64, over rows of 40 tokens. Below 1, ours are more accurate. bfloat16 represents the weights
  exactly. ± is the standard error over rows. There are 64 rows, or up to 1,024 if two standard errors do not decide whether the ratio is
  below 1. That happens with routed experts and large activations, where few tokens make up most of the mean. The ratio must not exceed 1 by
  more than two standard errors.
- **chunks**: the largest difference of keys and values, relative to the largest value. The first number compares the KV after `fork`,
  `truncate`, `drop`, `compose(recompute="all")` and a chunk file with a fresh prefill. The second compares the KV after
  `compose(recompute=0)` and `drop(mode="shift")` with keys computed at their new positions. A model with learned positions refuses the last
  two operations and gives the reason.
- **CPU decode**: the path of decode steps on a CPU: C, or plain torch with the reason.

Weights: with "large activations", some channels of the residual stream are a thousand times as large as the others. With "zero rows", some
embeddings, heads, experts and rows of projections are zero. A "padded vocabulary" has more rows than the tokenizer has tokens.

"""


def page(found: Sequence[Measures]) -> str:
    """Return the page in Markdown: the explanations and one table with a row per case."""
    import transformers

    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    head = HEAD.format(command=COMMAND, machine=platform.machine(), count=len(found), worst=_worst(found), **versions)
    columns = ("architecture", "setting", "logits", "bound", "greedy", "log-prob.", "bf16 prompts", "bf16 decode", "chunks", "CPU decode")
    rows = [columns, ("---", "---", *["--:"] * 6, "---", "---"), *map(_row, found)]
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(m: Measures) -> tuple[str, ...]:
    case, r = CASES[m.name], m.replies
    moved = "not moved: learned positions" if m.chunks.refused else f"{m.chunks.moved:.0e}"
    ratios = (f"{ratio.value:.2f} ± {ratio.deviation:.2f}" for ratio in (m.prompts, m.decode))
    wrong = f" **out of bounds: {', '.join(m.failures)}**" if m.failures else ""
    architecture = case.architecture.removesuffix("ForCausalLM")
    return (
        architecture, case.setting + wrong, f"{m.float32.ours:.1e}", f"{m.float32.bound:.1e}", f"{r.agreed} of {r.clear}",
        f"{r.logprob_error:.1e}", *ratios, f"{m.chunks.exact:.0e}; {moved}".replace("0e+00", "0"), m.path,
    )  # fmt: skip


def _worst(found: Sequence[Measures]) -> str:
    agreed, clear = (sum(getattr(m.replies, name) for m in found) for name in ("agreed", "clear"))
    share = max(m.float32.ours / m.float32.bound for m in found)
    soft = max(m.float32.ours for m in found if m.float32.bound <= 1e-4)
    ratio = max((ratio for m in found for ratio in (m.prompts, m.decode)), key=lambda ratio: ratio.value)
    return (
        f"The largest logit error is {soft:.1e} in cases with bound 1e-4, and {share:.0%} of the bound in all cases.\n{agreed:,} of "
        f"{clear:,} clear greedy tokens agree. Our mean error in bfloat16 is at most {ratio.value:.2f} ± {ratio.deviation:.2f} times "
        "transformers'."
    )
