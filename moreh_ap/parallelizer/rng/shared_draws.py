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
of the same name with as many dims has them there too. Where such draws differ from each other, the same ones have to
come in the same order. A draw whose numbers depend on the values of other rows cannot be shared. Which number goes
where follows the order of dims in memory, which is that of the two rows: one row leaves it open.

[Note: drawn again]
A checkpointed block draws once more in backward, from the state that it drew from in forward. That state is by what a
draw is recognised.

[Note: coins]
Numbers that all rows share may decide what else is drawn: one number whether a layer is left out, or one number a layer
at once. Two rows draw more than one does on the way to them, and would get others. So they are given the numbers that
the one row got, wherever both draw equally few (`Coins`), and the comparison is repeated with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moreh_ap.errors import ExactnessError
from moreh_ap.protocol.memory_format import memory_order
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
    }
)
"""Names of torch functions inside which operations draw; what draws anywhere else is not shared."""

_VALUES_DECIDE = frozenset(
    {"poisson", "binomial", "_sample_dirichlet", "_standard_gamma", "rrelu_with_noise", "randperm"}
)
"""Operations of which the values of a row decide how much is drawn for the next."""

_MOST_COINS = 1024
"""How many numbers a draw has at most that may decide about layers. Dropout, which decides nothing, draws more."""


class UnsharedDraw(Exception):
    """A forward draws random numbers of which a worker cannot tell its own part; the text says why."""


@dataclass(frozen=True)
class Share:
    """Rows `start:stop` of a batch of `total` rows."""

    start: int
    stop: int
    total: int

    def narrow(self, start: int, stop: int) -> Share:
        """Rows `start:stop` of these rows."""
        return Share(self.start + start, self.start + stop, self.total)


@dataclass(frozen=True)
class Rows:
    """How the rows lie in what is drawn for a batch: the dim that has them, and all dims as they are in memory."""

    dim: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """An operation of a forward that draws: its name, how many dims it draws, and how the rows lie in them.

    `rows` is None where every row sees the same numbers.
    """

    name: str
    num_dims: int
    rows: Rows | None


@dataclass(frozen=True)
class Drawn:
    """One operation that drew: its name, the shape of what it drew, and the order of the dims in memory."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]


class Coins:
    """The few numbers that a forward draws for all rows, which a second forward gets again. See [Note: coins].

    Attributes:
        found: Whether the second forward drew any that the rows leave alone.
    """

    def __init__(self) -> None:
        self.found = False
        self._first: list[Tensor | None] = []
        self._second: Iterator[Tensor | None] | None = None

    def again(self) -> None:
        """From now on the second forward draws."""
        self._second = iter(self._first)

    def pass_on(self, result: Tensor) -> None:
        """Keeps what the first forward draws, and gives it to the second."""
        if self._second is None:
            self._first.append(result.detach().clone() if result.numel() <= _MOST_COINS else None)
            return
        known = next(self._second, None)
        if known is not None and known.shape == result.shape:
            self.found = True
            result.copy_(known)


class DrawRecorder(TorchFunctionMode):
    """While active, notes everything that is drawn, in order.

    Args:
        coins: Gets, or gives, the few numbers that all rows share.
    """

    def __init__(self, coins: Coins | None = None) -> None:
        super().__init__()
        self.drawn: list[Drawn] = []
        self._coins = coins
        self._all = Recording()

    def __enter__(self) -> DrawRecorder:
        super().__enter__()
        self._all.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._all.__exit__(*raised)
        super().__exit__(*raised)
        if raised[0] is None and len(self._all.drawn) != len(self.drawn):
            names = sorted({draw.name for draw in self._all.drawn})
            raise UnsharedDraw(
                f"random numbers are drawn inside an operation that nobody looks into ({', '.join(names)})"
            )

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in MAY_DRAW:
            return func(*args, **(kwargs or {}))
        with Recording(self._coins) as recording:
            result = func(*args, **(kwargs or {}))
        self.drawn += recording.drawn
        return result


class Recording(TorchDispatchMode):
    """While active, notes what operations draw, in order; `coins` as in `DrawRecorder`."""

    def __init__(self, coins: Coins | None = None) -> None:
        super().__init__()
        self.drawn: list[Drawn] = []
        self._coins = coins

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _draws(func, args, kwargs or {}):
            if not isinstance(result, Tensor):  # fused attention with dropout
                raise UnsharedDraw(f"{func._opname} draws random numbers that nobody sees")
            order = memory_order(result) or tuple(range(result.ndim))
            self.drawn.append(Drawn(func._opname, tuple(result.shape), order))
            if self._coins is not None:
                self._coins.pass_on(result)
        return result


def draws_of(one_row: Sequence[Drawn], two_rows: Sequence[Drawn]) -> tuple[Draw, ...]:
    """Returns the draws of a forward, in order.

    Args:
        one_row: What a forward of one row drew.
        two_rows: What the same forward of two rows drew.

    Raises:
        UnsharedDraw: No such dim can be told. See [Note: which dim has the rows].
    """
    if [draw.name for draw in one_row] != [draw.name for draw in two_rows]:
        raise UnsharedDraw("how often random numbers are drawn depends on the rows")
    return tuple(Draw(two.name, len(two.shape), _rows_in(one, two)) for one, two in zip(one_row, two_rows))


def _rows_in(one: Drawn, two: Drawn) -> Rows | None:
    if one.shape == two.shape:
        return None
    dims = [dim for dim, sizes in enumerate(zip(one.shape, two.shape)) if sizes[0] != sizes[1]]
    if len(one.shape) != len(two.shape) or len(dims) != 1 or two.shape[dims[0]] != 2 * one.shape[dims[0]]:
        raise UnsharedDraw(f"one row draws {one.shape} random numbers, two rows {two.shape}")
    if one.name.rstrip("_") in _VALUES_DECIDE:
        raise UnsharedDraw(f"what {one.name} draws for a row depends on the rows before it")
    return Rows(dims[0], two.order)


class SharedDraws(TorchFunctionMode):
    """While active in a forward, everything that is drawn is this worker's part of what one device would draw.

    In the backward, where checkpointed blocks draw again, `again` has to be active: PyTorch runs backward outside of
    torch function modes.

    Args:
        draws: The draws of such a forward, as `draws_of` tells them.
        share: The rows that are computed here.
    """

    def __init__(self, draws: Sequence[Draw], share: Share) -> None:
        super().__init__()
        self._draws, self._share = draws, share
        self._next = 0
        self._by_order = False
        self._number_of: dict[int, int] = {}  # by the state of the stream before the draw
        self._is_drawing = False

    def again(self) -> AbstractContextManager[Any]:
        """Returns what has to be active in the backward."""
        return Sharing(self)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in MAY_DRAW:
            return func(*args, **(kwargs or {}))
        with Sharing(self):
            return func(*args, **(kwargs or {}))

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation that draws, for the rows that are computed here."""
        drawn = shape_drawn(func, args, kwargs)
        rows = None if self._is_drawing else self._rows_of(func._opname, len(drawn), kwargs.get("generator"))
        if rows is None:
            return func(*args, **kwargs)
        dim = rows.dim
        share = self._share
        entries, rest = divmod(drawn[dim], share.stop - share.start)
        if rest:
            raise ExactnessError(
                f"a forward of {share.stop - share.start} rows draws {tuple(drawn)} random numbers: not as many a row",
                "draws of which one dim follows the rows of the batch",
                'plan="tensor=2"',
            )
        whole_args, whole_kwargs = _enlarged(func, args, kwargs, rows, entries, share)
        self._is_drawing = True  # `again` may be active around a mode that a block put back
        try:
            whole = func(*whole_args, **whole_kwargs)
        finally:
            self._is_drawing = False
        own = whole.narrow(dim, share.start * entries, (share.stop - share.start) * entries)
        return args[0].copy_(own) if func._schema.is_mutable else own.clone()

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

    def _rows_of(self, name: str, num_dims: int, generator: torch.Generator | None) -> Rows | None:
        """How the rows lie in what is drawn next. See [Note: which dim has the rows]."""
        own = b"" if generator is None else generator.get_state().numpy().tobytes()
        number = self._number_of.setdefault(hash((state_of_stream(), own)), self._next)
        if number == self._next:
            self._next += 1
        found = {draw.rows for draw in self._draws if (draw.name, draw.num_dims) == (name, num_dims)}
        if len(found) == 1:
            return found.pop()
        in_order = self._draws[number] if number < len(self._draws) else None
        if in_order is None or (in_order.name, in_order.num_dims) != (name, num_dims):
            raise _other_draws(f"a forward draws {num_dims}-dimensional random numbers with {name}, and did not before")
        self._by_order = True
        return in_order.rows


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
        return self._shared.draw(func, args, kwargs) if _draws(func, args, kwargs) else func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Says whether an operation draws on the CPU: from the common stream, or from a generator of the model, of which
    all workers have a copy in the same state.

    Fused attention is marked as one that draws, and does only with a probability above zero.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags or not _is_on_cpu(args, kwargs):
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) > 0)


def _is_on_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    named = kwargs.get("device")
    places = [torch.device(named)] if named is not None else [arg.device for arg in args if isinstance(arg, Tensor)]
    return not places or places[0].type == "cpu"


def shape_drawn(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Returns the shape of what an operation draws."""
    place = _place_of_size(func)
    if place is not None:
        return tuple(args[place]) if place < len(args) else tuple(kwargs["size"])
    if func._opname == "randperm":
        return (args[0],)
    if func._opname == "multinomial":
        return (*args[0].shape[:-1], args[1])
    return torch.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, Tensor)))


def _place_of_size(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("size") if "size" in names else None


def _enlarged(
    func: Any, args: Any, kwargs: dict[str, Any], rows: Rows, entries: int, share: Share
) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments as the whole batch has them; of other rows, whose values are not here, ones."""
    own, whole = (share.stop - share.start) * entries, share.total * entries
    dim, rank = rows.dim, len(rows.order)

    def enlarge(tensor: Tensor) -> Tensor:
        at = dim - (rank - tensor.ndim)  # aligned as in broadcasting
        if at < 0 or tensor.shape[at] != own:
            return tensor
        order = rows.order if tensor.ndim == rank else range(tensor.ndim)
        sizes = [whole if d == at else tensor.shape[d] for d in order]
        large = tensor.new_ones(sizes).permute([order.index(d) for d in range(tensor.ndim)])
        large.narrow(at, share.start * entries, own).copy_(tensor)
        return large

    args, kwargs = tree_map_only(Tensor, enlarge, (args, kwargs))
    place = _place_of_size(func)
    if place is None:
        return args, kwargs
    given = args[place] if place < len(args) else kwargs["size"]
    size = [whole if d == dim else length for d, length in enumerate(given)]
    if place < len(args):
        return (*args[:place], size, *args[place + 1 :]), kwargs
    return args, {**kwargs, "size": size}
