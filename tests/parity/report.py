"""The page that shows all measures."""

import platform
from collections.abc import Sequence

import torch

from tests.parity.cases import CASES
from tests.parity.measure import Measures

COMMAND = "make parity"
HEAD = """\
# Parity with transformers
Every architecture beside [transformers](https://github.com/huggingface/transformers), in its odd settings and on numerically hard
weights: small models with random weights, saved by transformers and loaded by `load_model`. This page is written by
```
{command}
```
with Python {python}, torch {torch} and transformers {transformers} on a CPU ({machine}). The measures are in `tests.parity`, and
tests hold them to their bounds. transformers runs with `attn_implementation="eager"`: by its default, `sdpa`, Gemma 2 is another model,
without the soft cap on its attention scores.

**Worst over all {count} cases:** {worst}

- **logits**: in float32, the worst logit's distance to transformers' run in float64. Prompts of 1, 8, 33, 60 and as many tokens as the
  context has, batched, in chunks of 1, 7, 64 and 100 tokens, on pages of 1, 4 and 16; and decoded one token at a time.
- **bound**: the larger of 1e-4 and three times transformers' own distance in float32.
- **greedy**: through the engine, of the tokens that transformers is sure of by more than twice the bound, those that agree. Four prompts,
  64 tokens each, in five ways: batched and in chunks on the path that a CPU takes, the same in plain torch, each prompt alone, one after
  another on shared pages, and with shared pages read once.
- **log-prob.**: the worst distance of the drawn tokens' log-probabilities to transformers' in float32, which may be twice the bound.
- **bf16 prompts, bf16 decode**: in bfloat16, the mean distance of all logits of rows of 40 tokens to transformers' run in float64, over
  that of transformers' own run in bfloat16: below 1 is nearer to the truth. Weights are such that bfloat16 holds them exactly. ± is the
  standard error over rows, which are 64, and up to 1,024 while two of it leave open on which side of 1 the ratio lies: where experts are
  routed, or activations are large, few tokens make up most of the mean. The ratio must not exceed 1 by more than two of it.
- **chunks**: the largest distance of keys and values, relative to the largest: after `fork`, `truncate`, `drop`, `compose(recompute="all")`
  and a chunk file, beside a fresh prefill; then after `compose(recompute=0)` and `drop(mode="shift")`, beside keys computed where they now
  stand. A model with learned positions refuses the latter two, and says why.
- **CPU decode**: what runs decode steps on a CPU: C, or plain torch for the reason given.

Among the weights, "large activations" are channels of the residual stream a thousand times as large as the others, "zero rows" are
embeddings, heads, experts and rows of projections, and a padded vocabulary has more rows than the tokenizer has tokens.

"""


def page(found: Sequence[Measures]) -> str:
    """The page in Markdown, an architecture's table after the other's."""
    import transformers

    told = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    head = HEAD.format(command=COMMAND, machine=platform.machine(), count=len(found), worst=_worst(found), **told)
    columns = ("architecture", "setting", "logits", "bound", "greedy", "log-prob.", "bf16 prompts", "bf16 decode", "chunks", "CPU decode")
    rows = [columns, ("---", "---", *["--:"] * 6, "---", "---"), *map(_row, found)]
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(m: Measures) -> tuple[str, ...]:
    case, r = CASES[m.name], m.replies
    moved = "not moved: learned positions" if m.chunks.refused else f"{m.chunks.moved:.0e}"
    ratios = (f"{ratio.value:.2f} ± {ratio.deviation:.2f}" for ratio in (m.prompts, m.decode))
    wrong = f" **beyond its bound: {', '.join(m.failures)}**" if m.failures else ""
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
        f"a logit is off by {soft:.1e} where the bound is 1e-4, by {share:.0%} of its bound anywhere;\n{agreed:,} of {clear:,} clear "
        f"greedy tokens agree; our mean error in bfloat16 is at most {ratio.value:.2f} ± {ratio.deviation:.2f} of transformers'."
    )
