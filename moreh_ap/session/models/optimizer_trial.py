"""A trial of an optimizer's step, on copies of it with a few small parameters.

Decides whether a step treats each parameter, and each element of one, by itself, and what else a step does. Must not
know workers. See [Note: tried optimizers] in `own_optimizers.py`.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from moreh_ap.device.function_mode import without_redirection
from moreh_ap.device.patches.optimizer_steps import SCRIPT_STEP
from moreh_ap.protocol.script_code.value_forms import is_of_script

Step = Callable[..., Any]
Settings = list[dict[str, Any]]
"""Those of each group of an optimizer."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_TORCH = {"defaults", "state", "param_groups", "step"}
_ALSO_OF_TORCH = ("_optimizer_", "_zero_grad", "_warned_", "_opt_called", "_step_count", "_moreh_")
_MAX_SIZE, _MAX_SHAPES, _NUM_STEPS = 160, 12, 12
_LEARNING_RATE = 0.01  # a schedule may begin with 0, at which every step is the same
_SIZES = (0.03, 1.0, 30.0)  # of gradients, one step after another
_THIRD = 0.34  # where rows are cut: at a place that has nothing to do with blocks of elements
_COMMON = 0.5  # part of a gradient that is the same in all steps: optimizers that find their rate look for it
_FEW_FLOPS = 16  # of products, an element and step: one of a column with a row takes 2
_TOLERANCE = 1e-3  # of the largest change in a row


class Refused(Exception):
    """Why an optimizer cannot step on the workers; ends a sentence that begins with its name."""


def is_plain(value: Any) -> bool:
    """Returns whether a value is a constant, or made of constants."""
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):  # workers find one of a library by its name
        module = sys.modules.get(value.__module__ or "")
        return getattr(module, value.__name__, None) is value and not is_of_script(value.__module__)
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, list, frozenset)) and all(map(is_plain, value)))


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a group, as a copy; a number in a tensor is a plain one.

    Raises:
        Refused: One is of another kind.
    """
    found = {name: _copied(value) for name, value in group.items() if name not in ("params", "param_names")}
    for name, value in found.items():
        if not is_plain(value):
            raise Refused(f"has {name!r} of type {type(value).__name__} in its groups")
    return found


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns attributes of an optimizer that PyTorch has not given it, as a copy.

    Raises:
        Refused: One is no plain value.
    """
    found = {}
    for name, value in vars(optimizer).items():
        if name in _OF_TORCH or name.startswith(_ALSO_OF_TORCH):
            continue
        if not is_plain(value):
            raise Refused(f"has an attribute {name} of type {type(value).__name__}")
        found[name] = _copied(value)
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else value
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if type(value) is list else value


class Copy:
    """An optimizer like another, with other parameters, in this process.

    Args:
        optimizer: The other one, of which nothing changes.
        step: Its class's `step`, without hooks.
        values: The first values of its parameters.
        group_of: Of each parameter, the number of its group.
    """

    def __init__(self, optimizer: Optimizer, step: Step, values: Sequence[Tensor], group_of: Sequence[int]) -> None:
        self._step, self._attributes = step, attributes_of(optimizer)
        self.parameters = [nn.Parameter(value.clone()) for value in values]
        self._copy: Optimizer = object.__new__(type(optimizer))
        Optimizer.__init__(self._copy, list(self.parameters), optimizer.defaults)  # its own may take other arguments
        vars(self._copy).update(attributes_of(optimizer))
        self._groups = self._copy.param_groups = [
            {**settings_of(group), "params": [one for one, of in zip(self.parameters, group_of) if of == index]}
            for index, group in enumerate(optimizer.param_groups)
        ]

    @property
    def settings(self) -> Settings:
        """The settings of its groups."""
        return [settings_of(group) for group in self._groups]

    def set(self, settings: Settings) -> None:
        """Changes the settings of its groups to others."""
        for group, new in zip(self._groups, settings):
            parameters = group["params"]
            group.clear()
            group.update({**new, "params": parameters})

    def state(self, number: int) -> dict[str, Any]:
        """Returns what is kept of a parameter."""
        return dict(self._copy.state.get(self.parameters[number], {}))

    def take(self, gradients: Sequence[Tensor], *, in_closure: bool = False) -> None:
        """Takes a step.

        Args:
            gradients: Of the parameters.
            in_closure: Whether a closure gives them, which the step has to call once, before it changes anything.

        Raises:
            Refused: The step has failed, or done something else beside.
        """
        before = [one.detach().clone() for one in self.parameters] if in_closure else self.parameters
        loss = torch.zeros((), device="cpu")
        calls: list[bool] = []

        def closure() -> Tensor:
            for parameter, gradient in zip(self.parameters, gradients):
                parameter.grad = gradient.clone()
            calls.append(all(map(torch.equal, self.parameters, before)))
            return loss

        if in_closure:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            closure()
        said, drawn = io.StringIO(), _random_states()
        with without_hooks(type(self._copy)), without_redirection(), contextlib.redirect_stdout(said), torch.no_grad():
            try:
                returned = self._step(self._copy, closure) if in_closure else self._step(self._copy)
            except Exception as error:
                raise Refused(f"raised {type(error).__name__} on small parameters: {error}") from error
        if said.getvalue():
            raise Refused("prints")
        if returned is not (loss if in_closure else None) or calls != [True]:
            raise Refused("returns something")
        if not _are_same_states(drawn, _random_states()):
            _put_back(drawn)
            raise Refused("draws random numbers")

    def check(self) -> None:
        """Returns if steps have changed nothing but parameters, their state, and settings.

        Raises:
            Refused: They have.
        """
        if attributes_of(self._copy) != self._attributes:
            raise Refused("changes its own attributes")
        if not {id(one) for one in self._copy.state} <= set(map(id, self.parameters)):
            raise Refused("keeps state that is not of a parameter")
        for name, value in (entry for entries in self._copy.state.values() for entry in entries.items()):
            if type(value) is not Tensor and not is_plain(value):
                raise Refused(f"keeps {name!r} of type {type(value).__name__}")


class Trial:
    """Steps of copies of an optimizer on small parameters.

    Args:
        optimizer: Left as it is.
        step: Its class's `step`, without hooks.
    """

    def __init__(self, optimizer: Optimizer, step: Step) -> None:
        self._optimizer, self._step = optimizer, step
        generator = torch.Generator().manual_seed(0)
        self._group_of: list[int] = []
        self._values: list[Tensor] = []
        self._gradients: list[list[Tensor]] = []
        seen: set[tuple[tuple[int, ...], torch.dtype]] = set()
        for index, group in enumerate(optimizer.param_groups):
            sizes = {(tuple(_small_size(one.shape, _MAX_SIZE)), one.dtype) for one in group["params"]}
            in_order = sorted(sizes, key=lambda one: (-len(one[0]), str(one)))  # matrices tell more than vectors
            chosen = [*in_order[:1], *(one for one in in_order[1:] if one not in seen)][:_MAX_SHAPES]
            seen.update(chosen)
            for shape, dtype in chosen:
                self._group_of.append(index)
                self._values.append((0.02 * _drawn(shape, 2.0, generator)).to(dtype))
                common = _COMMON * _drawn(shape, -2.0, generator)
                drawn = [common + _drawn(shape, -2.0, generator) for _ in range(_NUM_STEPS)]
                self._gradients.append([(one * size).to(dtype) for one, size in zip(drawn, cycle(_SIZES))])
        if not self._values:
            raise Refused("has no parameters")
        self._all = range(len(self._values))
        self._together = self._run(self._all)

    @property
    def changes_settings(self) -> bool:
        """Whether a step changes settings of groups, such as a number of steps."""
        return self._together.settings != self._begun(self._all).settings

    def needs_whole(self) -> bool:
        """Returns whether a step needs whole parameters.

        Raises:
            Refused: It is not enough to step one parameter after the other.
        """
        for number in self._all:
            if not self._are_alike(number, (self._run([number]), 0)):
                raise Refused("computes a parameter, or a setting of its groups, from other parameters")
        return not all(self._may_cut(dim) for dim in (0, 1))

    def _may_cut(self, dim: int) -> bool:
        """Returns whether parts of parameters along a dim, of which one may be empty, end as the whole ones do."""
        try:
            parts = [self._run(self._all, Cut(dim, *ends)) for ends in ((0, _THIRD), (_THIRD, _THIRD), (_THIRD, 1.0))]
        except Refused:
            return False
        return all(self._are_alike(number, *((part, number) for part in parts), dim=dim) for number in self._all)

    def multiplies(self) -> bool:
        """Returns whether a step multiplies matrices; products of a column with a row (Adafactor) are none."""
        with FlopCounterMode(display=False) as counter:
            self._run(self._all)
        return counter.get_total_flops() > _FEW_FLOPS * _NUM_STEPS * sum(value.numel() for value in self._values)

    def takes_closure(self) -> bool:
        """Returns whether a step with a closure is a call of that, and then a step; it returns what that returns."""
        try:
            copy = self._run(self._all, in_closure=True)
        except Refused:
            return False
        return all(self._are_alike(number, (copy, number)) for number in self._all)

    def twin(self) -> tuple[Copy, list[Tensor]]:
        """Returns a copy with very small parameters, whose settings change as those of the optimizer do; gradients too.

        Raises:
            Refused: They change in another way.
        """
        generator = torch.Generator().manual_seed(1)
        shapes = [tuple(_small_size(value.shape, 2)) for value in self._values]
        values, gradients = ([_drawn(shape, 1.0, generator) for shape in shapes] for _ in range(2))
        copy = Copy(self._optimizer, self._step, values, self._group_of)
        copy.set(_at_rate(copy.settings))
        for _ in range(_NUM_STEPS):
            copy.take(gradients)
        if copy.settings != self._together.settings:
            raise Refused("computes the settings of its groups from parameters")
        return Copy(self._optimizer, self._step, values, self._group_of), gradients

    def _begun(self, numbers: Sequence[int], cut: Cut | None = None) -> Copy:
        values = [_part(self._values[number], cut) for number in numbers]
        copy = Copy(self._optimizer, self._step, values, [self._group_of[number] for number in numbers])
        copy.set(_at_rate(copy.settings))
        return copy

    def _run(self, numbers: Sequence[int], cut: Cut | None = None, *, in_closure: bool = False) -> Copy:
        """Returns a copy with some of the parameters, or parts of them, after its steps."""
        copy = self._begun(numbers, cut)
        for at in range(_NUM_STEPS):
            copy.take([_part(self._gradients[number][at], cut) for number in numbers], in_closure=in_closure)
        copy.check()
        return copy

    def _are_alike(self, number: int, *parts: tuple[Copy, int], dim: int = 0) -> bool:
        """Returns whether a parameter, what is kept of it, and settings are as in the steps of all parameters.

        Args:
            number: The parameter.
            *parts: Copies with it, or with parts of it in their order, and its number there.
            dim: The dim along which these are parts.
        """
        before, whole, kept = self._values[number], self._together.parameters[number], self._together.state(number)
        if any(copy.settings != self._together.settings for copy, _ in parts):
            return False
        values = [copy.parameters[index].detach() for copy, index in parts]
        states = [copy.state(index) for copy, index in parts]
        change = whole.detach().double() - before.double()
        if not _is_near(change, _joined(values, before, dim).double() - before.double()):
            return False
        for key, of_whole in kept.items():
            has_elements = [value.numel() > 0 or not before.numel() for value in values]
            others = [state[key] for state, has in zip(states, has_elements) if has and key in state]
            if not others:
                return False
            if not isinstance(of_whole, Tensor):
                is_same = all(one == of_whole for one in others)
            elif of_whole.shape == before.shape and before.dim() > 0:
                held = [(value, state[key]) for value, state in zip(values, states) if key in state]
                are_laid_out = all(value.shape == one.shape for value, one in held)
                is_same = are_laid_out and _is_near(of_whole, _joined([one for _, one in held], before, dim))
            else:
                is_same = all(one.shape == of_whole.shape and _is_near(of_whole, one) for one in others)
            if not is_same:
                return False
        return True


def _at_rate(settings: Settings) -> Settings:
    return [{**one, "lr": _LEARNING_RATE} if type(one.get("lr")) is float else one for one in settings]


class Cut(NamedTuple):
    """A part of tensors along a dim, from one fraction of its size to another; of tensors without it all."""

    dim: int
    begin: float
    end: float


def _part(value: Tensor, cut: Cut | None) -> Tensor:
    if cut is None or value.dim() <= cut.dim:
        return value
    begin, end = (int(fraction * value.shape[cut.dim]) for fraction in (cut.begin, cut.end))
    return value.narrow(cut.dim, begin, end - begin)


def _small_size(shape: torch.Size, largest: int) -> Iterator[int]:
    """Yields the sizes of a small tensor for one of a shape: like it where it is small."""
    for dim, size in enumerate(shape):
        yield min(size, largest if dim < 2 else 3)


def _drawn(shape: Sequence[int], rise: float, generator: torch.Generator) -> Tensor:
    """Returns random numbers whose size rises from the first row, by the factor ``exp(2 * rise)``."""
    values = torch.randn(tuple(shape), generator=generator, device="cpu", dtype=torch.float32)
    if not shape:
        return values
    sizes = torch.linspace(-rise, rise, shape[0], device="cpu").exp()
    return values * sizes.view(-1, *[1] * (len(shape) - 1))


def _rows(value: Tensor) -> int:
    return value.shape[0] if value.dim() else 0


def _joined(parts: Sequence[Tensor], like: Tensor, dim: int) -> Tensor:
    return torch.cat(list(parts), dim) if like.dim() > dim else parts[0]


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
def without_hooks(kind: type[Optimizer]) -> Iterator[None]:
    """Inside, each `step` of a class is as it was written: PyTorch has put those of all hooks around it."""
    hooked = [(base, vars(base)["step"]) for base in kind.__mro__ if hasattr(vars(base).get("step"), "hooked")]
    try:
        for base, step in hooked:
            base.step = getattr(step, SCRIPT_STEP, step.__wrapped__)  # type: ignore[attr-defined]
        yield
    finally:
        for base, step in hooked:
            base.step = step  # type: ignore[attr-defined]
