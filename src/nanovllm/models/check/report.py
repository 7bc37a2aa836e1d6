"""What was found: a value with every figure, as a table and as JSON."""

import math
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanovllm.models.check.agree import Agreement
from nanovllm.models.check.compare import FACTOR, Compared, Errors, error_bound, keeps
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.fast.path import FastPath
from nanovllm.models.model import Model
from nanovllm.types import Tensor

SCHEMA = 1
PLAIN = "plain"
SHOWN = 8  # places of disagreement in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One layer: the path chosen for its decode steps of few rows, its largest absolute norm gains, its worst relative errors.

    `q_gain` and `k_gain` are None where the heads have no norm, `fast` where there is no fast form. `bound` is what `fast` may be.
    """

    index: int
    path: str
    input_gain: float
    post_gain: float
    q_gain: float | None
    k_gain: float | None
    plain: Errors
    fast: Errors | None
    bound: Errors


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """The final norm and the logits, in the same terms."""

    path: str
    gain: float
    plain: float
    fast: float | None
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The fast decode path of a model beside its plain layers. `fast` names the path, None where the model has none here.

    `rows` are the sizes of the decode batches that the layers were compared in, `tuning` the file whose cuts the kernels had; None: their
    defaults.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    fast: str | None
    num_tokens: int
    rows: tuple[int, ...]
    layers: tuple[LayerReport, ...]
    head: HeadReport
    agreement: Agreement | None
    tuning: str | None = None

    @property
    def fallen(self) -> tuple[str, ...]:
        """What has a fast form and does not use it: indices of layers, and `head`."""
        head = ("head",) if self.head.fast is not None and self.head.path == PLAIN else ()
        return (*(str(layer.index) for layer in self.layers if layer.fast is not None and layer.path == PLAIN), *head)

    def as_json(self) -> dict[str, Any]:
        """A JSON object; a figure that is no number is null."""
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        return _finite({"schema": SCHEMA, **asdict(self), "falls_back": list(self.fallen), "versions": versions})


def chosen(compared: Compared, dtype: torch.dtype) -> FastChoice:
    """The layers whose fast form keeps the bound, and whether the head's does."""
    fast_head = compared.fast_head
    return FastChoice(
        layers=tuple(keeps(fast, plain, dtype) for fast, plain in zip(compared.fast or (), compared.plain, strict=True)),
        head=fast_head is not None and fast_head <= error_bound(compared.plain_head, dtype),
    )


def reported(
    model: Model,
    fast: FastPath | None,
    choice: FastChoice | None,
    rows: tuple[int, ...],
    compared: Compared,
    agreement: Agreement | None,
    cuts: Cuts | None = None,
) -> CheckReport:
    """The report of what was measured."""
    none, device = [None] * len(compared.plain), model.device
    layers = tuple(
        LayerReport(
            index=index,
            path=fast.name if fast is not None and choice is not None and choice.layers[index] else PLAIN,
            input_gain=_largest(w.input_norm),
            post_gain=_largest(w.post_norm),
            q_gain=None if w.q_norm is None else _largest(w.q_norm),
            k_gain=None if w.k_norm is None else _largest(w.k_norm),
            plain=plain,
            fast=quick,
            bound=Errors(output=error_bound(plain.output, model.dtype), kv=error_bound(plain.kv, model.dtype)),
        )
        for index, (w, plain, quick) in enumerate(zip(model.params.layers, compared.plain, compared.fast or none, strict=True))
    )
    return CheckReport(
        model=model.name,
        architecture=model.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_name(device),
        fast=None if fast is None else fast.name,
        num_tokens=len(compared.final),
        rows=rows,
        layers=layers,
        head=HeadReport(
            path=fast.name if fast is not None and choice is not None and choice.head else PLAIN,
            gain=_largest(model.params.final_norm),
            plain=compared.plain_head,
            fast=compared.fast_head,
            bound=error_bound(compared.plain_head, model.dtype),
        ),
        agreement=agreement,
        tuning=None if cuts is None else cuts.source,
    )


def device_name(device: torch.device) -> str:
    """A GPU's name, or the machine's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def table(report: CheckReport) -> str:
    """The report in aligned columns, the verdict last."""
    spacing = error_bound(0.0, getattr(torch, report.dtype))
    top = ("", "", "largest gain", "", "", "", "error of the output", "", "", "of keys, values", "", "")
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
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    starts = [sum(widths[:i]) + 2 * i for i in range(len(widths))]
    over = ""
    for start, text in zip(starts, top, strict=True):
        over = over.ljust(start) + text if text else over
    batches = ", ".join(map(str, report.rows))
    return "\n".join(
        [
            f"{report.model}, {report.architecture}, {report.dtype} on {report.device}, fast path: {report.fast or 'none here'}"
            + (f", cut as {report.tuning} says" if report.tuning else ""),
            f"Worst relative errors beside float64, over {report.num_tokens} tokens, decode batches of {batches}; "
            f"bound: {FACTOR:g} x plain + {spacing:.1e}",
            "",
            over,
            *("  ".join(cell.ljust(w) if i == 1 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
              for row in (head, *rows)),
            "",
            *_agreement_lines(report.agreement),
            verdict(report),
        ]
    )  # fmt: skip


def verdict(report: CheckReport) -> str:
    """One sentence: what runs how, or where the plain layers themselves give what is no number."""
    broken = [f"layer {each.index}" for each in report.layers if not math.isfinite(each.plain.output + each.plain.kv)]
    broken += [] if math.isfinite(report.head.plain) else ["the head"]
    if broken:
        return f"No numbers come out of {', '.join(broken)}, in plain torch too: its weights, or what they make of text, are not finite."
    if report.fast is None:
        return "There is no fast path for this model here: every layer runs in plain torch."
    if not report.fallen:
        return f"All {len(report.layers)} layers and the head keep the bound: decode steps run on the path {report.fast}."
    return f"Beyond the bound, and so in plain torch: {', '.join(name if name == 'head' else f'layer {name}' for name in report.fallen)}."


def _agreement_lines(found: Agreement | None) -> list[str]:
    if found is None:
        return []
    exact = f"with float64 on {found.fast_exact}, the plain layers on {found.plain_exact}"
    lines = [f"Greedy agreement, tokens of {found.num_tokens}: with the plain layers on {found.both}; {exact}"]
    apart = sorted(found.apart, key=lambda each: -each.margin)
    lines += [f"  token {each.place}: {each.fast}, plain {each.plain}, float64 {each.exact} by {each.margin:.2g}" for each in apart[:SHOWN]]
    return lines + [f"  and {len(apart) - SHOWN} more, by less"] * (len(apart) > SHOWN)


def _largest(gain: Tensor) -> float:
    return float(gain.abs().amax())


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _errors(plain: float, fast: float | None, bound: float) -> tuple[str, str, str]:
    return f"{plain:.1e}", "-" if fast is None else f"{fast:.1e}", "-" if fast is None else f"{bound:.1e}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
