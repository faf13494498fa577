"""The verdict of the trials of a forward: whether its batch may be split, and how its results are put together.

Decides how that is written down, and which calls it is about. Must not know how it is found out (`split_check.py`).

[Note: numbers that decide]
A forward may ask a number among its arguments which way to go, in Python (`if step > warm_up:`) or in functions that
have a kink (`(step - warm_up).relu()`). Of what it does for one number, a trial with another shows nothing. So calls of
such forwards have one verdict for each value of these numbers, as those have whose numbers are Python's own.

[Note: forwards that set themselves up]
Some layers find scales or a codebook in the rows of the first call, and note in a buffer that they have. That call is
computed whole, and what is true of it is not true of the next one, which is tried anew. So it is where a model has such
a buffer and the first call of a kind cannot be split for what becomes of its state, or cannot run on a few rows (which
are fewer than there are codes).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

from torch import Tensor, nn

from moreh_ap.parallelizer.data.lent_rows import NOTHING_OF
from moreh_ap.parallelizer.items.item_reduction import ItemRules
from moreh_ap.parallelizer.loss.mean_rules import NO_RULES, MeanRules
from moreh_ap.parallelizer.rng.policy import Draws
from moreh_ap.parallelizer.row_dims.own_entries import Entries
from moreh_ap.parallelizer.row_dims.placed_rows import PlacedRows, RowsAlong
from moreh_ap.parallelizer.row_dims.row_steps import REST, Step, in_any_order
from moreh_ap.parallelizer.statistics.batch_parts import Part
from moreh_ap.protocol.batch import are_numbers

GATHERS = "gathers what it sees of the rows"
"""How a refusal ends that is about a buffer or parameter."""


@dataclass(frozen=True)
class SplitVerdict:
    """The verdict on one forward, the same on every worker.

    Attributes:
        split: Whether slices of the batch give exactly what the whole batch gives.
        kinds: The kind of every leaf of the result but for attributes; empty where `split` is False.
        attributes: The kinds of the leaves of each attribute that the forward sets.
        reason: Why it cannot be split; empty where it can.
        draws: Of everything drawn from common streams, how the rows lie in it.
        written: The parameters that the forward itself changes.
        added: What it adds to the model's modules: layers, buffers, hooks.
        means: Whether it takes means over the batch.
        rules: Which of its numbers are means over the batch.
        joined: Whether it can be split only if batch normalisation takes the statistics of all workers' rows.
        steps: What each function in it does with rows, where it can be split only if rows are gathered where they meet.
        in_order: Whether the forward took the steps in this order; else it goes several ways. See `Gathering`.
        dims: Where each leaf of the arguments has rows, where that is not dim 0 of all that have any.
        group: Every slice needs a multiple of so many rows: the forward cannot run on fewer, or others were not tried.
        could_run: Whether the script's forward ran on the rows that were tried, as far as one device could run it.
        faults: Tracebacks of errors in the trials that are ours, on this worker.
        items: What it does with items, where no tensor has a row for each. See `item_probe.py`.
        kept: Names of numbers that have to be those of a worker's rows. See `kept_rows.py`.
        entries: Which arguments number the entries of a worker's rows. See `own_entries.py`.
        places: Where each leaf of the result but for attributes has rows that are gathered after the forward; empty
            where none are. Their kind is "same".
        attribute_places: The same of the leaves of each attribute.
        parts: Which normalisations take the statistics of parts of the batch. See `statistics/batch_parts.py`.
        sizes: Of batches of how many rows this is true; None: of all.
        by_values: Whether numbers among the arguments decide what the forward does. See [Note: numbers that decide].
        is_of_first: Whether it holds for one call alone. See [Note: forwards that set themselves up].
    """

    split: bool
    kinds: tuple[str, ...]
    reason: str
    means: bool = True
    rules: MeanRules = NO_RULES
    joined: bool = False
    draws: Draws = field(default_factory=Draws)
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    in_order: bool = True
    dims: tuple[int | None, ...] | None = None
    group: int = 1
    could_run: bool = True
    faults: tuple[str, ...] = ()
    items: ItemRules | None = None
    kept: frozenset[str] = frozenset()
    entries: Entries = ()
    places: tuple[RowsAlong | None, ...] = ()
    attribute_places: Mapping[str, tuple[RowsAlong | None, ...]] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    sizes: range | None = None
    by_values: bool = False
    is_of_first: bool = False

    @classmethod
    def unsplit(cls, reason: str, **known: Any) -> SplitVerdict:
        """Returns the verdict on a forward that cannot be split, for a reason; `known`: other attributes."""
        return cls(False, (), reason, **known)

    def may_set_up(self, module: nn.Module) -> bool:
        """Says whether the forward may only set the module up, once. See [Note: forwards that set themselves up]."""
        flags = any(buffer.numel() == 1 and not buffer.is_floating_point() for buffer in module.buffers())
        return flags and not self.split and (not self.could_run or self.reason.endswith(GATHERS))

    def is_about(self, rows: int | None) -> bool:
        """Says whether this is true of batches of so many rows."""
        return self.sizes is None or rows in self.sizes

    @property
    def is_about_one_size(self) -> bool:
        """Whether this is true of batches of one size only."""
        return self.sizes is not None and len(self.sizes) == 1

    def with_results_of(self, other: SplitVerdict) -> SplitVerdict:
        """Returns this verdict with what another knows of the results."""
        found = replace(self, kinds=other.kinds, attributes=other.attributes)
        return replace(found, places=other.places, attribute_places=other.attribute_places)

    def placed(self, rows: int) -> PlacedRows | None:
        """Returns what has to be cut and gathered around a forward on some of so many rows; None if nothing."""
        if self.steps or (self.dims is None and not self.places):
            return None
        return PlacedRows(rows, self.dims, self.places, self.attribute_places)

    def joined_with(self, other: SplitVerdict) -> SplitVerdict:
        """Returns the verdict on a forward that also goes the way of another one, if that differs in steps alone."""
        alike: dict[str, Any] = {"steps": (), "in_order": True, "faults": ()}
        is_alike = self.split and replace(self, **alike) == replace(other, **alike)
        has_rest = any(step.name == REST for step in (*self.steps, *other.steps))  # which begins at a number of steps
        steps = in_any_order([*self.steps, *other.steps]) if is_alike and not has_rest else None
        return self if steps is None else replace(self, steps=steps, in_order=False)


class Verdicts:
    """Verdicts by kinds of calls. Those of one kind may differ in the sizes of their tensors.

    Attributes:
        known: What was found. A key is a kind, or a kind with sizes, a number of rows or values.
        gathering: Where each leaf of the arguments has rows, of kinds whose verdicts are those of certain sizes: where
            rows lie in each tensor that a forward computes depends on sizes, so forwards that gather rows are tried
            once for each combination of sizes other than the number of rows.
        of_one_size: Kinds whose verdicts are those of batches of one number of rows.
        by_values: Kinds whose verdicts are those of certain numbers. See [Note: numbers that decide].
        earlier: By key, what was found before a forward took another way.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, SplitVerdict] = {}
        self.gathering: dict[Hashable, Sequence[int | None]] = {}
        self.of_one_size: set[Hashable] = set()
        self.by_values: set[Hashable] = set()
        self.earlier: dict[Hashable, list[SplitVerdict]] = {}

    def key(self, kind: Hashable, leaves: Sequence[Any], rows: int | None) -> Hashable:
        """Returns the key of the calls of a kind that share a verdict with one of these arguments, so many rows."""
        if kind in self.by_values:
            numbers = [leaf for leaf in leaves if are_numbers(leaf) and leaf.shape[:1] != (rows,)]
            values = tuple(str(leaf.tolist()) for leaf in numbers)
            return (self._key_of_sizes(kind, leaves, rows), values)
        return self._key_of_sizes(kind, leaves, rows)

    def _key_of_sizes(self, kind: Hashable, leaves: Sequence[Any], rows: int | None) -> Hashable:
        if kind not in self.gathering:
            return (kind, rows) if kind in self.of_one_size else kind
        tensors = [(leaf, dim) for leaf, dim in zip(leaves, self.gathering[kind]) if isinstance(leaf, Tensor)]
        sizes = tuple(tuple(size for at, size in enumerate(leaf.shape) if at != dim) for leaf, dim in tensors)
        return (kind, sizes, rows) if kind in self.of_one_size else (kind, sizes)

    def add(
        self, kind: Hashable, leaves: Sequence[Any], rows: int, first_dims: Sequence[int | None], found: SplitVerdict
    ) -> SplitVerdict:
        """Keeps what was found of a call.

        Args:
            kind: Its kind.
            leaves: Those of its arguments.
            rows: Rows of the batch.
            first_dims: Where each leaf has rows as sizes suggest it.
            found: The verdict.

        Returns:
            The verdict, joined with those on other ways that calls like it have gone.
        """
        if found.steps:
            self.gathering.setdefault(kind, found.dims or first_dims)
        self.of_one_size.update((kind,) if found.is_about_one_size else ())
        self.by_values.update((kind,) if found.by_values else ())
        key = self.key(kind, leaves, rows)
        self.known[key] = reduce(SplitVerdict.joined_with, self.earlier.get(key, ()), found)
        return self.known[key]


class Apart(NamedTuple):
    """The outcome of a trial of rows by themselves.

    Attributes:
        found: The verdict.
        untried: Which of the forward's numbers may be those of the batch, where it cannot be split so and takes
            statistics of the rows; empty otherwise.
    """

    found: SplitVerdict
    untried: tuple[MeanRules, ...] = ()


class Joined(NamedTuple):
    """The outcome of a trial of rows of which normalisations take statistics.

    Attributes:
        found: The verdict.
        draws: What was drawn for them.
        counts_rows: Whether the forward asks how many there are, or cuts them.
    """

    found: SplitVerdict
    draws: Draws
    counts_rows: bool


def may_lack_rows(verdict: SplitVerdict) -> bool:
    """Returns whether what workers do who compute rows of others can be told from what their own would give."""
    is_plain = verdict.split and not verdict.attributes and not verdict.written and verdict.group == 1
    is_plain = is_plain and not verdict.draws.are_for_routed and not verdict.places
    return is_plain and NOTHING_OF.issuperset(verdict.kinds)
