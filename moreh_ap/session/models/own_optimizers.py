"""Which optimizers beside those of `torch.optim` step on the workers, found out by trying them on a few numbers.

Decides what such an optimizer may use and change. Must not know how a step is sent, or how workers take one.

[Note: tried optimizers]
A class of the script or of a library may do anything in `step`. The workers take its steps if it computes a
parameter, and what it keeps of one, from this parameter, its gradient, the settings of its group and plain attributes
of the optimizer. So its `step` runs on small parameters on the CPU: on all of them, on each alone, and on parts of
their rows. Each run takes steps enough for what a step does only now and then, with gradients small and large. If
parameters alone end as they do together, workers may step each; if parts do too, workers may step their shards, and
need whole parameters otherwise. The values of rows rise in size and their gradients fall, so that a norm or a mean over
rows, or what is divided by one, is another for parts.
"""

from __future__ import annotations

import contextlib
import io
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moreh_ap.device.function_mode import without_redirection
from moreh_ap.device.patches.optimizer_steps import SCRIPT_STEP
from moreh_ap.protocol.script_code.script_globals import Variable, used_by_method

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_OF_TORCH = {"defaults", "state", "param_groups", "step"}
_ALSO_OF_TORCH = ("_optimizer_", "_zero_grad", "_warned_", "_opt_called", "_step_count", "_moreh_")
_MAX_SIZE, _MAX_SHAPES, _NUM_STEPS = 160, 12, 12
_LEARNING_RATE = 0.01  # a schedule may begin with 0, at which every step is the same
_SIZES = (0.03, 1.0, 30.0)  # of gradients, one step after another
_TOLERANCE = 1e-3  # of the largest change in a row


class Refused(Exception):
    """Why an optimizer cannot step on the workers; ends a sentence that begins with its name."""


@dataclass(frozen=True)
class OwnStep:
    """How the optimizers of a class step on the workers.

    Attributes:
        pickled_class: The class.
        attributes: Plain attributes of the optimizer.
        needs_whole: Whether a step needs whole parameters; else each element is computed from those at its place.
        variables: Those outside of the optimizer that it reads, with their values.
    """

    pickled_class: bytes
    attributes: dict[str, Any]
    needs_whole: bool
    variables: tuple[tuple[Variable, Any], ...]

    def check(self, optimizer: Optimizer) -> None:
        """Returns if nothing has changed of what the workers cannot know.

        Raises:
            Refused: Something has.
        """
        for variable, value in self.variables:
            if variable.value() != value:
                raise Refused(f"reads {variable.name}, which has changed")
        if _attributes_of(optimizer) != self.attributes:
            raise Refused("has other attributes than at its first step")


def own_step_of(optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> OwnStep:
    """Returns how an optimizer steps on the workers, from a few steps of copies.

    Args:
        optimizer: One with parameters.
        step: Its class's `step`, without hooks.

    Raises:
        Refused: It has to step in the script's process.
    """
    if type(optimizer).add_param_group is not Optimizer.add_param_group:
        raise Refused("has an add_param_group of its own")
    attributes = _attributes_of(optimizer)
    for group in optimizer.param_groups:
        for name, value in _settings_of(group).items():
            if not (_is_plain(value) or _is_number(value)):
                raise Refused(f"has {name!r} of type {type(value).__name__} in its groups")
    read, written = used_by_method(type(optimizer), step)
    if written:
        raise Refused(f"changes the variable {written[0].name}")
    for variable in read:
        if not (_is_plain(variable.value()) or isinstance(variable.value(), _CODE)):
            raise Refused(f"reads the variable {variable.name}, of type {type(variable.value()).__name__}")
    variables = tuple((variable, variable.value()) for variable in read)
    with _without_hooks(type(optimizer)):
        needs_whole = _Trial(optimizer, step, attributes).needs_whole()
        try:
            pickled_class = cloudpickle.dumps(type(optimizer))
        except Exception as error:  # of whatever the class, or a function that it names, has
            raise Refused(f"cannot be sent: {error}") from error
    return OwnStep(pickled_class, attributes, needs_whole, variables)


def _attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    found = {}
    for name, value in vars(optimizer).items():
        if name in _OF_TORCH or name.startswith(_ALSO_OF_TORCH):
            continue
        if not _is_plain(value):
            raise Refused(f"has an attribute {name} of type {type(value).__name__}")
        found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, frozenset)) and all(map(_is_plain, value)))


def _is_number(value: Any) -> bool:
    """Returns whether a setting is a number in a tensor, or a list of plain values: both are sent as such."""
    return (isinstance(value, Tensor) and value.dim() == 0) or (isinstance(value, list) and all(map(_is_plain, value)))


Kept = list[tuple[Tensor, dict[str, Any]]]
"""Parameters after some steps, and what the optimizer keeps of each."""


class _Trial:
    """Steps of copies of an optimizer on small parameters. See [Note: tried optimizers].

    Args:
        optimizer: Left as it is.
        step: Its class's `step`.
        attributes: Those of the copies.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[Optimizer], Any], attributes: dict[str, Any]) -> None:
        self._optimizer, self._step, self._attributes = optimizer, step, attributes
        generator = torch.Generator().manual_seed(0)
        self._group_of: list[int] = []
        self._values: list[Tensor] = []
        self._gradients: list[list[Tensor]] = []
        for index, group in enumerate(optimizer.param_groups):
            sizes = {(tuple(_small_size(one.shape)), one.dtype) for one in group["params"]}
            for shape, dtype in sorted(sizes, key=str)[:_MAX_SHAPES]:
                self._group_of.append(index)
                self._values.append((0.02 * _drawn(shape, 2.0, generator)).to(dtype))
                gradients = [_drawn(shape, -2.0, generator) for _ in range(_NUM_STEPS)]
                self._gradients.append([(one * size).to(dtype) for one, size in zip(gradients, cycle(_SIZES))])

    def needs_whole(self) -> bool:
        """Returns whether a step needs whole parameters.

        Raises:
            Refused: It is not enough to step one parameter after the other.
        """
        numbers = range(len(self._values))
        together = self._run(numbers)
        for number in numbers:
            if not self._are_alike(number, together[number], self._run([number])[0]):
                raise Refused("computes a parameter from others")
        cuts = [_rows(one) for one in self._values]
        try:
            parts = [
                self._run(numbers, [slice(0, rows // 3) for rows in cuts]),
                self._run(numbers, [slice(rows // 3, rows // 3) if rows else slice(0, 0) for rows in cuts]),
                self._run(numbers, [slice(rows // 3, rows) for rows in cuts]),
            ]
        except Refused:
            return True
        return not all(
            self._are_alike(number, together[number], *(part[number] for part in parts)) for number in numbers
        )

    def _run(self, numbers: Sequence[int], rows: Sequence[slice] | None = None) -> Kept:
        """Returns what some of the parameters, or parts of them, are after the steps of a new copy."""

        def part(number: int, value: Tensor) -> Tensor:
            return value.clone() if rows is None or value.dim() == 0 else value[rows[number]].clone()

        parameters = {number: nn.Parameter(part(number, self._values[number])) for number in numbers}
        copy: Optimizer = object.__new__(type(self._optimizer))
        Optimizer.__init__(copy, list(parameters.values()), self._optimizer.defaults)  # its own may take more
        vars(copy).update(self._attributes)
        copy.param_groups = []
        for index, group in enumerate(self._optimizer.param_groups):
            own = [one for number, one in parameters.items() if self._group_of[number] == index]
            settings = {name: _copied(value) for name, value in _settings_of(group).items()}
            if isinstance(settings.get("lr"), float):
                settings["lr"] = _LEARNING_RATE
            copy.param_groups.append({**settings, "params": own})
        before = [_settings_of(group) for group in copy.param_groups]
        for at in range(_NUM_STEPS):
            for number, one in parameters.items():
                one.grad = part(number, self._gradients[number][at])
            self._take(copy)
        if [_settings_of(group) for group in copy.param_groups] != before:
            raise Refused("changes the settings of its groups")
        if _attributes_of(copy) != self._attributes:
            raise Refused("changes its own attributes")
        if not {id(one) for one in copy.state} <= {id(one) for one in parameters.values()}:
            raise Refused("keeps state that is not of a parameter")
        return [(one.detach(), dict(copy.state.get(one, {}))) for one in parameters.values()]

    def _take(self, copy: Optimizer) -> None:
        said = io.StringIO()
        with without_redirection(), contextlib.redirect_stdout(said), torch.no_grad():
            drawn = _random_states()
            try:
                returned = self._step(copy)
            except Exception as error:
                raise Refused(f"raised {type(error).__name__} on small parameters: {error}") from error
        if said.getvalue():
            raise Refused("prints")
        if returned is not None:
            raise Refused("returns something")
        if not _are_same_states(drawn, _random_states()):
            _put_back(drawn)
            raise Refused("draws random numbers")

    def _are_alike(
        self, number: int, whole: tuple[Tensor, dict[str, Any]], *parts: tuple[Tensor, dict[str, Any]]
    ) -> bool:
        """Returns whether parts of a parameter, put together, are what it is as a whole, and what is kept of it."""
        value, kept = whole
        before = self._values[number]
        joined = value if not parts else _joined([one for one, _ in parts], before)
        change, other = value.double() - before.double(), joined.double() - before.double()
        if not _is_near(change, other):
            return False
        for key, of_whole in kept.items():
            others = [entries[key] for one, entries in parts if key in entries and (one.numel() or not before.numel())]
            if not others:
                return False
            if not isinstance(of_whole, Tensor):
                if any(one != of_whole for one in others):
                    return False
            elif of_whole.shape == before.shape and before.dim() > 0:
                rows = [entries[key] for _, entries in parts if key in entries]
                if sum(map(_rows, rows)) != _rows(before) or not _is_near(of_whole, _joined(rows, before)):
                    return False
            elif not all(one.shape == of_whole.shape and _is_near(of_whole, one) for one in others):
                return False
        return True


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value


def _small_size(shape: torch.Size) -> Iterator[int]:
    """Yields the sizes of a small tensor for one of a shape: like it where it is small."""
    for dim, size in enumerate(shape):
        yield min(size, _MAX_SIZE if dim < 2 else 3)


def _drawn(shape: Sequence[int], rise: float, generator: torch.Generator) -> Tensor:
    """Returns random numbers whose size rises from the first row, by the factor ``exp(2 * rise)``."""
    values = torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)
    if not shape:
        return values
    sizes = torch.linspace(-rise, rise, shape[0], device="cpu").exp()
    return values * sizes.view(-1, *[1] * (len(shape) - 1))


def _rows(value: Tensor) -> int:
    return value.shape[0] if value.dim() else 0


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if like.dim() else parts[0]


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Returns whether each row of a tensor is that of another, but for rounding."""
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    rows_RE, others_RE = (tensor.double().reshape(_rows(tensor) or 1, -1) for tensor in (one, other))
    difference_R = (rows_RE - others_RE).abs().amax(1)
    return bool((difference_R <= _TOLERANCE * rows_RE.abs().amax(1)).all())


RandomStates = tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]


def _random_states() -> RandomStates:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # type: ignore[return-value]


def _put_back(states: RandomStates) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _are_same_states(one: RandomStates, other: RandomStates) -> bool:
    of_numpy = all(map(np.array_equal, one[2], other[2]))
    return of_numpy and torch.equal(one[0], other[0]) and one[1] == other[1]


@contextlib.contextmanager
def _without_hooks(kind: type[Optimizer]) -> Iterator[None]:
    """Inside, each `step` of a class is as it was written: PyTorch has put those of all hooks around it."""
    hooked = [(base, vars(base)["step"]) for base in kind.__mro__ if hasattr(vars(base).get("step"), "hooked")]
    try:
        for base, step in hooked:
            base.step = getattr(step, SCRIPT_STEP, step.__wrapped__)  # type: ignore[attr-defined]
        yield
    finally:
        for base, step in hooked:
            base.step = step  # type: ignore[attr-defined]
