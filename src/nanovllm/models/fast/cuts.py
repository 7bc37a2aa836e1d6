"""The tile configurations of the kernels of `fused.py`. A tile configuration (`Cut`) says how a kernel divides its work.

`nanovllm tune` measures them. They replace the kernels' defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from immutables import Map

from nanovllm.ops.cuts import Cut

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCuts:
    """The tile configurations of one batch size, one for each kernel; empty means the kernel's default.

    A product has the fields of `Tile` or `WideTile` in order. `attend` has the numbers of `cut_of`.
    """

    qkv: Cut = ()
    attend: Cut = ()
    o: Cut = ()
    gate_up: Cut = ()
    down: Cut = ()
    head: Cut = ()


PARTS = tuple(StepCuts.__dataclass_fields__)  # in the order of a step
DEFAULT = StepCuts()
SHIPPED = " (shipped with nanovllm)"  # the end of `Cuts.source` for a tuning file of the package


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The tile configurations of a model's decode steps, by number of rows. `source` names the tuning file, for messages and reports."""

    steps: Map[int, StepCuts] = field(default_factory=Map)
    source: str = ""

    @property
    def default(self) -> bool:
        """Whether every step uses the kernels' defaults."""
        return all(step == DEFAULT for step in self.steps.values())

    def at(self, rows: int) -> StepCuts:
        """The tile configurations of a step of exactly `rows` rows; the defaults if it has none."""
        return self.steps.get(rows, DEFAULT)


def with_cuts(function: Callable[..., R], cuts: Cuts | StepCuts | None) -> Callable[..., R]:
    """The function with `cuts` bound, or the function itself if `cuts` is None or has only defaults."""
    other = cuts is not None and not (cuts.default if isinstance(cuts, Cuts) else cuts == DEFAULT)
    return partial(function, cuts=cuts) if other else function
