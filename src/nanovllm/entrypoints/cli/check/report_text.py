"""The report of the comparison as text: a table of the layers, the greedy agreement and the verdict."""

import math

import torch

from nanovllm.entrypoints.display.tables import aligned
from nanovllm.models.check.agree import Agreement
from nanovllm.models.check.compare import FACTOR, error_bound
from nanovllm.models.check.report import CheckReport

SHOWN = 8  # most places of disagreement in the table


def table(report: CheckReport) -> str:
    """The report in aligned columns, the verdict last."""
    spacing = error_bound(0.0, getattr(torch, report.dtype))
    top = ("", "", "largest norm weight", "", "", "", "error of the output", "", "", "of keys, values", "", "")
    head = ("layer", "path", "input", "post", "q", "k", "plain", "fast", "bound", "plain", "fast", "bound")
    rows: list[tuple[str, ...]] = [
        (
            str(e.index), e.path, *map(_gain, (e.input_gain, e.post_gain, e.q_gain, e.k_gain)),
            *_errors(e.plain.output, None if e.fast is None else e.fast.output, e.bound.output),
            *_errors(e.plain.kv, None if e.fast is None else e.fast.kv, e.bound.kv),
        )
        for e in report.layers
    ]  # fmt: skip
    last, dash = report.head, ("-",) * 3
    rows.append(("head", last.path, _gain(last.gain), *dash, *_errors(last.plain, last.fast, last.bound), *dash))
    starts, width = [], 0
    for column in zip(head, *rows, strict=True):
        starts.append(width)
        width += max(map(len, column)) + 2
    over = ""
    for start, text in zip(starts, top, strict=True):
        over = over.ljust(start) + text if text else over
    batches = ", ".join(map(str, report.rows))
    return "\n".join(
        [
            f"{report.model}, {report.architecture}, {report.dtype} on {report.device}, fast path: {report.fast or 'none'}"
            + (f", tuned by {report.tuning}" if report.tuning else ""),
            f"Worst relative errors compared with float64, over {report.num_tokens} tokens, in decode batches of {batches} rows; "
            f"bound: {FACTOR:g} x plain + {spacing:.1e}",
            "",
            over,
            *aligned(head, rows, left=(1,)),
            "",
            *_agreement_lines(report.agreement),
            verdict(report),
        ]
    )


def verdict(report: CheckReport) -> str:
    """One sentence: the layers that run on the fast path or fall back, or the plain layers that give NaN or infinite values."""
    broken = [f"layer {each.index}" for each in report.layers if not math.isfinite(each.plain.output + each.plain.kv)]
    broken += [] if math.isfinite(report.head.plain) else ["the head"]
    if broken:
        return f"The output is NaN or infinite in {', '.join(broken)}, in plain torch too: the weights or the activations are not finite."
    if report.fast is None:
        return "This model has no fast path on this device: every layer runs in plain torch."
    if not report.fallen:
        return f"All {len(report.layers)} layers and the head keep the bound: decode steps run on the path {report.fast}."
    return f"Above the bound, and so in plain torch: {', '.join(name if name == 'head' else f'layer {name}' for name in report.fallen)}."


def _agreement_lines(agreement: Agreement | None) -> list[str]:
    if agreement is None:
        return []
    exact = f"with float64 on {agreement.fast_exact}, the plain layers on {agreement.plain_exact}"
    lines = [f"Greedy agreement, tokens of {agreement.num_tokens}: with the plain layers on {agreement.both}; {exact}"]
    apart = sorted(agreement.apart, key=lambda each: -each.margin)
    lines += [f"  token {each.place}: {each.fast}, plain {each.plain}, float64 {each.exact} by {each.margin:.2g}" for each in apart[:SHOWN]]
    return lines + [f"  and {len(apart) - SHOWN} more, by less"] * (len(apart) > SHOWN)


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _errors(plain: float, fast: float | None, bound: float) -> tuple[str, str, str]:
    return f"{plain:.1e}", "-" if fast is None else f"{fast:.1e}", "-" if fast is None else f"{bound:.1e}"
