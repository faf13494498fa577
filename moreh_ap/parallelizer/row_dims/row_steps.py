"""The steps of a forward: for each call of a torch function or module how it treats rows, as learned from trials.

Decides how that is written down. Must not know how it is learned (`trial.lockstep`) or computed with
(`data.row_gathering`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from moreh_ap.parallelizer.row_dims.row_numbers import RowCount


class Rows(NamedTuple):
    """The rows of a batch slice in a tensor.

    Attributes:
        dim: Where they are.
        groups: How often they follow each other along it: more than 1 where tensors with rows were concatenated.
    """

    dim: int
    groups: int = 1

    def split(self, tensor: Tensor, rows: int) -> Tensor:
        """Returns the tensor with (groups, rows, entries of a row) in place of the dim."""
        return tensor.unflatten(self.dim, (self.groups, rows, -1))

    def merge(self, tensor: Tensor) -> Tensor:
        """Undoes `split`."""
        return tensor.flatten(self.dim, self.dim + 2)

    def narrow(self, tensor: Tensor, rows: int, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop` of a tensor that has `rows` of them, as dense in memory as all rows are."""
        own = self.merge(self.split(tensor, rows).narrow(self.dim + 1, start, stop - start))
        return own.clone() if self.dim else own


REST = "rest"
"""The name of the step that means the rest of a forward. See [Note: the rest] in `row_gathering.py`."""

SHARE = "share"
Placement = Rows | str | None
"""Where a tensor's entries are: its `Rows`, `SHARE`, or None for one device's tensor."""


@dataclass(frozen=True)
class Step:
    """One call of a torch function or module, and how it treats rows; equal on every worker.

    Attributes:
        name: The function or module.
        enters: Whether it is a module in which rows meet: its functions and modules have steps of their own.
        adds_up: Whether arguments that are summands are added up before.
        gathers: Whether rows are gathered before.
        follows: The numbers among the arguments that follow the number of rows.
        for_all: Whether those numbers have to be the ones of the whole batch, and else of this worker's rows.
        writes: Whether it writes to its first argument.
        cuts: Whether the result is one device's at first, and cut to this worker's rows.
        deals: Where the result of a module has the entries that its one tensor has along dim 0, if each worker computes
            some of them and the results are gathered. See `dealt_modules.py`.
        results: The placements of the tensors in the result.
        site: Where in the model's code it is called, as `call_sites.site_of_call` tells.
        given: The placements of the tensors among the arguments.
        is_of_sharding: Whether what gathers parameters (FSDP2) calls it, and not the forward.
    """

    name: str
    enters: bool = False
    adds_up: bool = False
    gathers: bool = False
    follows: tuple[RowCount, ...] = ()
    for_all: bool = False
    writes: bool = False
    cuts: bool = False
    deals: Rows | None = None
    results: tuple[Placement, ...] = ()
    site: int = 0
    given: tuple[Placement, ...] = ()
    is_of_sharding: bool = False

    @property
    def meets(self) -> bool:
        """Whether it does more with rows than to work row by row."""
        does_more = self.gathers or self.cuts or self.deals is not None or bool(self.follows)
        return does_more or SHARE in (*self.given, *self.results)

    @property
    def is_of_one_size(self) -> bool:
        """Whether it gets a number that is known for batches of one size only."""
        return any(count.is_of_one_size for count in self.follows)

    @property
    def place(self) -> Hashable:
        """The key of a step in a forward that goes several ways: function, line, and where arguments have rows."""
        return self.name, self.site, self.given


@dataclass(frozen=True)
class Gathering:
    """The steps of a forward, and the rows of its arguments.

    Attributes:
        steps: What each call of a torch function or module does, in order; those inside a module that works row by row
            are left out.
        dims: For each leaf of the arguments where it has rows; None: nowhere.
        rows: Rows of the batch.
        cuts: Whether the arguments have the rows of the whole batch, and are cut to this worker's by the forward.
        in_order: Whether the forward takes the steps in this order. It does not where numbers of Python or NumPy decide
            which functions it calls, or what it has done before does: these are the steps of all ways that were seen.
    """

    steps: tuple[Step, ...]
    dims: tuple[int | None, ...]
    rows: int
    cuts: bool = False
    in_order: bool = True


def in_any_order(steps: Iterable[Step]) -> tuple[Step, ...] | None:
    """Returns steps of a forward that goes several ways, each once; None if a step is not the same on all of them."""
    by_place: dict[Hashable, Step] = {}
    for step in steps:
        if by_place.setdefault(step.place, step) != step:
            return None
    return tuple(by_place.values())
