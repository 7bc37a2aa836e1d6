"""How the kernels of `fused.py` cut their work: a value, made by `nanovllm tune`, in the place of the defaults."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from immutables import Map

from nanovllm.ops.cuts import Cut

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCuts:
    """The cuts of one number of rows, by the part of the model that they are for; empty: the kernel's default.

    Products: `Tile` or `WideTile` as integers, in the order of their fields. `attend`: the numbers of `cut_of`.
    """

    qkv: Cut = ()
    attend: Cut = ()
    o: Cut = ()
    gate_up: Cut = ()
    down: Cut = ()
    head: Cut = ()


PARTS = tuple(StepCuts.__dataclass_fields__)  # in the order of a step
DEFAULT = StepCuts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The cuts of a model's steps by their number of rows; `source` says where they came from, and is told."""

    steps: Map[int, StepCuts] = field(default_factory=Map)
    source: str = ""

    @property
    def default(self) -> bool:
        """Whether every step has the kernels' defaults."""
        return all(step == DEFAULT for step in self.steps.values())

    def at(self, rows: int) -> StepCuts:
        """The cuts of a step of exactly so many rows."""
        return self.steps.get(rows, DEFAULT)


def with_cuts(function: Callable[..., R], cuts: Cuts | StepCuts | None) -> Callable[..., R]:
    """The function by these cuts, and itself where they are none, or the defaults of all that they name."""
    said = cuts is not None and not (cuts.default if isinstance(cuts, Cuts) else cuts == DEFAULT)
    return partial(function, cuts=cuts) if said else function
