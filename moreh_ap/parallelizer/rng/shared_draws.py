"""Random numbers inside a forward: each worker draws those of the whole batch and keeps those of its rows.

Decides which part of what is drawn belongs to a worker. Must not know models, losses, or where the stream started.

[Note: one stream]
On one device dropout draws one mask for the whole batch, from one stream. Workers that start from the same state of
that stream and draw the same shapes in the same order have the same mask, of which each uses its rows; afterwards all
streams stand where that of one device would. This costs every worker the drawing of all rows, which is why it is done
on the CPU, where "one device" draws from the process's own generator and a script's losses can be compared with those
of a run without the one line. What is drawn on a GPU is left alone: each worker seeds that stream for itself.

[Note: which dim has the rows]
A shape alone does not tell: (8, 64) may be 8 rows or the 8 heads of every row. So a forward of two rows and one of one
row are compared (`draws_of`): the dim that doubled has the rows. In later forwards of the kind, a draw by an operation
of the same name with as many dims has them there too. Where such draws differ, those at the same place in the code do;
where these differ too, the same ones have to come in the same order. A draw whose numbers depend on the values of other
rows cannot be shared. Which number goes where follows the order of dims in memory of the two rows; one leaves it open.

[Note: several entries]
A forward that concatenates two pictures of each row draws for twice as many rows: one picture of each, then the other
(`repeat`). One that views heads as rows draws for the heads of a row, then for those of the next. The trial finds out
which, if what is drawn shows: masks that leave out one row in ten are all alike in a few rows. So where a trial draws
one number an entry, these are as small and as large as can be, in turn (`with_both_ends`).

[Note: drawn again]
A checkpointed block draws once more in backward, from the state that it drew from in forward. That state is by what a
draw is recognised.

[Note: routed rows]
A mixture of experts calls an expert with the rows that are routed to it (``x[mask]``): no dim follows the rows of the
batch, and how many a worker has, only its own router knows. Such a draw is known by the place in the code where it
happens. There every worker says how many it draws for, draws for all of them together, and keeps its own: those of
earlier workers come before. Where the routed rows were found in a mask with another dim before that of the rows
(``torch.where(mask_KN)``, the k-th choice of each token), they follow each other within every entry of that dim. Both
are right if the routed rows are in the order of the batch; the trial compares. An expert that a worker calls with no
rows draws nothing there by itself, and still goes on from where the stream is after the rows of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.observation.call_sites import site_of_call
from moreh_ap.parallelizer.rng.drawing_operations import (
    draws_numbers,
    place_of_size,
    shape_drawn,
    with_both_ends,
    with_one_row,
)
from moreh_ap.parallelizer.rng.found_rows import FINDS_ROWS, FoundRows
from moreh_ap.parallelizer.rng.packed_sequences import lengths_in, places_of
from moreh_ap.protocol.rng_state import state_of_stream

MAY_DRAW = frozenset(
    {
        *("alpha_dropout", "alpha_dropout_", "dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_"),
        *("feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout", "feature_dropout_"),
        *("bernoulli", "bernoulli_", "multinomial", "rand", "rand_like", "randint", "randint_like"),
        *("randn", "randn_like", "random_", "normal", "normal_", "uniform_", "exponential_", "cauchy_"),
        *("geometric_", "log_normal_", "gumbel_softmax", "gru", "lstm", "rnn_relu", "rnn_tanh"),
        *("fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
        *("fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
        *("multi_head_attention_forward", "scaled_dot_product_attention"),
        *("binomial", "poisson", "randperm", "rrelu", "rrelu_", "kaiming_uniform_"),
        *("_sample_dirichlet", "_standard_gamma"),  # what distributions call: Beta, Dirichlet, Gamma
    }
)
"""Names of torch functions inside which operations draw; what draws anywhere else is not shared."""


class UnsharedDraw(Exception):
    """A forward draws random numbers of which a worker cannot find its own part, for the reason in the text."""


@dataclass(frozen=True)
class Share:
    """Rows `start:stop` of a batch of `total` rows."""

    start: int
    stop: int
    total: int

    def narrow(self, start: int, stop: int) -> Share:
        """Rows `start:stop` of these rows."""
        return Share(self.start + start, self.start + stop, self.total)


class Here(NamedTuple):
    """Which entries along a dim of all that is drawn are drawn for rows that are here: `own` of `whole`."""

    where: slice | Tensor
    own: int
    whole: int


class Counts(Protocol):
    """Tells how many routed rows there are elsewhere."""

    def add_up(self, state: int, own: Sequence[int], share: Share) -> tuple[Sequence[int], Sequence[int]]:
        """Returns how many there are before those that are here, and how many there are, as many numbers as in `own`.

        Args:
            state: Tells where the stream is.
            own: How many are here, in each group of rows that follow each other.
            share: The rows of the batch that are here.
        """

    def rank(self, state: int, own: Sequence[int], share: Share) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the places of the rows that are here among all, the longest first, and the lengths of all.

        Args:
            state: Tells where the stream is.
            own: The lengths of the rows that are here, the longest first.
            share: The rows of the batch that are here.
        """


@dataclass(frozen=True)
class Rows:
    """How the rows lie in what is drawn for a batch: the dim that has them, and all dims as they are in memory.

    `groups`: where rows of the batch have different numbers of entries along it, in how many groups those follow each
    other; 0 where each row has as many. See [Note: routed rows]. `are_packed`: they are the steps of packed sequences.
    `has_several`: whether a row has several entries. `repeat`: whether all rows follow each other once for each.
    See [Note: several entries].
    """

    dim: int
    order: tuple[int, ...]
    groups: int = 0
    are_packed: bool = False
    repeat: bool = False
    has_several: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Draw:
    """An operation of a forward that draws: its name, how many dims it draws, and how the rows lie in them.

    `rows` is None where every row sees the same numbers. `site` is where in the code it is drawn, if for routed rows;
    `place` is where for any rows.
    """

    name: str
    num_dims: int
    rows: Rows | None
    site: int = 0
    place: int = field(default=0, compare=False)


def have_several(draws: Sequence[Draw]) -> bool:
    """Returns whether a row has several entries in some draws, which may lie together or not."""
    return any(draw.rows is not None and draw.rows.has_several for draw in draws)


def repeated(draws: Sequence[Draw]) -> tuple[Draw, ...]:
    """Returns draws in which all rows follow each other once for each entry that a row has."""
    return tuple(
        draw if draw.rows is None or draw.rows.groups else replace(draw, rows=replace(draw.rows, repeat=True))
        for draw in draws
    )


class SharedDraws(TorchFunctionMode):
    """While active in a forward, everything that is drawn is this worker's part of what one device would draw.

    In the backward, where checkpointed blocks draw again, `again` has to be active: PyTorch runs backward outside of
    torch function modes.

    Args:
        draws: The draws of such a forward, as `draws_of` returns them.
        share: The rows that are computed here.
        counts: Say how many routed rows there are elsewhere; None where all rows are here.
        is_trial: Whether what is drawn is to show which entries a row has. See [Note: several entries].
    """

    def __init__(
        self, draws: Sequence[Draw], share: Share, counts: Counts | None = None, is_trial: bool = False
    ) -> None:
        super().__init__()
        self._draws, self._share, self._is_trial = draws, share, is_trial
        self.counts = counts
        self._routed: dict[int, Rows] = {}
        self._found: FoundRows | None = None
        for draw in draws:
            if draw.site and draw.rows is not None:
                self._routed[draw.site] = draw.rows
                self._found = self._found or (FoundRows() if draw.rows.groups > 1 else None)
        self._known: dict[int, tuple[Rows, Here]] = {}  # of routed rows, by the number of the draw
        self._next = 0
        self._by_order = False
        self._number_of: dict[int, int] = {}  # by the state of the stream before the draw
        self._is_drawing = self._draws_for_others = False
        self._lengths: list[int] | None = None
        self._passed_over: dict[bytes, Tensor] = {}  # by the state before a draw for no rows, that after it

    def again(self) -> AbstractContextManager[Any]:
        """Returns what has to be active in the backward."""
        return Sharing(self)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self._found is not None and name in FINDS_ROWS:
            return self._found.kept(args, kwargs or {}, func(*args, **(kwargs or {})))
        if name not in MAY_DRAW:
            return func(*args, **(kwargs or {}))
        one_row = with_one_row(name, args, kwargs or {}) if self._routed else None
        if one_row is not None:
            self._draws_for_others = True
            try:
                with Sharing(self):
                    func(*one_row, **(kwargs or {}))
            finally:
                self._draws_for_others = False
        self._lengths = lengths_in(name, args) if self._routed else None
        with Sharing(self):
            return func(*args, **(kwargs or {}))

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation that draws, for the rows that are computed here."""
        drawn = shape_drawn(func, args, kwargs)
        found = None if self._is_drawing else self._rows_of(func._opname, drawn, kwargs)
        if found is None:
            return func(*args, **kwargs)
        rows, here = found
        if self._draws_for_others:
            if not here.whole:
                return args[0]
            here, before = Here(slice(0, 1), 1, here.whole), state_of_stream()
        if rows.are_packed:  # where rows are equally long, a layer may have a dim of steps and one of rows
            given, args = args, tree_map_only(Tensor, lambda tensor: tensor.view(-1, tensor.shape[-1]), args)
        whole_args, whole_kwargs = _enlarged(func, args, kwargs, rows, here)
        self._is_drawing = True  # `again` may be active around a mode that a block put back
        try:
            whole = func(*whole_args, **whole_kwargs)
        finally:
            self._is_drawing = False
        if self._draws_for_others:
            self._passed_over[before] = torch.default_generator.get_state()
        if self._is_trial and not rows.groups and here.whole > self._share.total and whole.numel() == here.whole:
            whole = with_both_ends(func._opname, args, whole)
        own = whole[_along(rows.dim, here.where)]
        if func._schema.is_mutable:
            args[0].copy_(own)
        if rows.are_packed:
            return given[0] if func._schema.is_mutable else own.view(drawn).clone()
        return args[0] if func._schema.is_mutable else own.clone()

    def has_drawn(self) -> bool:
        """Says whether anything was drawn so far, be it from a generator of the model."""
        return self._next > 0

    def end(self) -> None:
        """The forward is over.

        Raises:
            ExactnessError: It drew less often than before, and which draw was which was told by their order.
        """
        if self._by_order and self._next < len(self._draws):
            raise _other_draws(
                f"a forward draws random numbers {self._next} times, and {len(self._draws)} times before"
            )

    def _rows_of(self, name: str, drawn: Sequence[int], kwargs: dict[str, Any]) -> tuple[Rows, Here] | None:
        """How the rows lie in what is drawn next, and which are here. See [Note: which dim has the rows]."""
        generator, num_dims = kwargs.get("generator"), len(drawn)
        of_generator = b"" if generator is None else generator.get_state().numpy().tobytes()
        while self._passed_over and (after := self._passed_over.get(state_of_stream())) is not None:
            torch.default_generator.set_state(after)  # what was drawn for others is left out where a block runs again
        state = hash((state_of_stream(), of_generator))
        number = self._number_of.setdefault(state, self._next)
        if number == self._next:
            self._next += 1
        elif number in self._known:
            return self._known[number]
        routed = self._routed.get(site_of_call()) if self._routed else None
        if routed is not None:
            own = math.prod(drawn[:-1]) if routed.are_packed else drawn[routed.dim]
            here = self._routed_here(state, routed, 0 if self._draws_for_others else own)
            if here.whole:
                self._known[number] = routed, here
            else:  # which leaves the stream where it is
                del self._number_of[state]
            return routed, here
        alike = [draw for draw in self._draws if not draw.site and (draw.name, draw.num_dims) == (name, num_dims)]
        found = {draw.rows for draw in alike}
        if len(found) > 1:
            found = {draw.rows for draw in alike if draw.place == site_of_call()}
        if len(found) == 1:
            return self._each_row(found.pop(), drawn)
        in_order = self._draws[number] if number < len(self._draws) else None
        if in_order is None or (in_order.name, in_order.num_dims) != (name, num_dims):
            raise _other_draws(f"a forward draws {num_dims}-dimensional random numbers with {name}, and did not before")
        self._by_order = True
        return self._each_row(in_order.rows, drawn)

    def _each_row(self, rows: Rows | None, drawn: Sequence[int]) -> tuple[Rows, Here] | None:
        """Where each row has as many entries, returns which are here."""
        if rows is None:
            return None
        share = self._share
        entries, rest = divmod(drawn[rows.dim], share.stop - share.start)
        if rest:  # rows that are routed, which few rows did not show: other workers learn by where the streams end
            torch.rand(share.start + 1)
            return None
        where: slice | Tensor = slice(share.start * entries, share.stop * entries)
        if rows.repeat:
            own = torch.arange(share.start, share.stop)
            where = torch.cat([own + number * share.total for number in range(entries)])
        return rows, Here(where, drawn[rows.dim], share.total * entries)

    def _packed_here(self, state: int, own: int) -> Here:
        lengths = self._lengths
        if lengths is None or sum(lengths) != own or len(lengths) != self._share.stop - self._share.start:
            raise _other_draws("the rows that a forward draws random numbers for are not packed sequences as before")
        if self.counts is None:
            return Here(slice(0, own), own, own)
        ranks, of_all = self.counts.rank(state, lengths, self._share)
        return Here(places_of(ranks, of_all), own, sum(of_all))

    def _routed_here(self, state: int, rows: Rows, own: int) -> Here:
        if rows.are_packed:
            return self._packed_here(state, own)
        groups = None if self._found is None or rows.groups == 1 else self._found.groups_of(own)
        if rows.groups > 1 and (groups is None or len(groups) != rows.groups):
            raise _other_draws("the rows that a forward draws random numbers for were not found in a mask as before")
        here: Sequence[int] = [own] if groups is None else groups
        before: Sequence[int] = [0] * len(here)
        totals = here
        if self.counts is not None:
            before, totals = self.counts.add_up(state, here, self._share)
        firsts = [sum(totals[:group]) + before[group] for group in range(len(here))]
        places = [torch.arange(first, first + count) for first, count in zip(firsts, here, strict=True)]
        return Here(torch.cat(places), own, sum(totals))


def _other_draws(fact: str) -> ExactnessError:
    return ExactnessError(
        fact,
        "the same draws in every forward of a kind",
        "torch.rand(()) every time, and a condition on what it gives",
    )


class Sharing(TorchDispatchMode):
    """While active, operations that draw give what `SharedDraws` says."""

    def __init__(self, draws: SharedDraws) -> None:
        super().__init__()
        self._shared = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._shared.draw(func, args, kwargs) if draws_numbers(func, args, kwargs) else func(*args, **kwargs)


def _along(dim: int, where: slice | Tensor) -> tuple[slice | Tensor, ...]:
    """Returns the index of some entries along a dim."""
    return *[slice(None)] * dim, where


def _enlarged(
    func: Any, args: Any, kwargs: dict[str, Any], rows: Rows, here: Here
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments as the whole batch has them; of other rows, whose values are not here, ones."""
    dim, rank = rows.dim, len(rows.order)

    def enlarge(tensor: Tensor) -> Tensor:
        at = dim - (rank - tensor.ndim)  # aligned as in broadcasting
        if at < 0 or tensor.shape[at] != here.own:
            return tensor
        order = rows.order if tensor.ndim == rank else range(tensor.ndim)
        sizes = [here.whole if d == at else tensor.shape[d] for d in order]
        large = tensor.new_ones(sizes).permute([order.index(d) for d in range(tensor.ndim)])
        large[_along(at, here.where)] = tensor
        return large

    args, kwargs = tree_map_only(Tensor, enlarge, (args, kwargs))
    place = place_of_size(func)
    if func._opname == "randperm":
        return (here.whole, *args[1:]), kwargs
    if place is None:
        return args, kwargs
    given = args[place] if place < len(args) else kwargs["size"]
    size = [here.whole if d == dim else length for d, length in enumerate(given)]
    if place < len(args):
        return (*args[:place], size, *args[place + 1 :]), kwargs
    return args, {**kwargs, "size": size}
