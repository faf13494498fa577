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

[Note: settings that a step changes]
Many optimizers of libraries count steps in their groups (``group["step"] += 1``). What a step makes of the settings
must not depend on parameters: it is the same in all runs of the trial. Then workers make the same of them, and the
script's groups get what a step of a copy with a few numbers makes of theirs.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch import Tensor
from torch.optim import Optimizer

from moreh_ap.device.tensor import OWN_ATTRIBUTES
from moreh_ap.protocol.script_code.script_globals import Variable, used_by_method
from moreh_ap.session.models.optimizer_trial import (
    Copy,
    Refused,
    Step,
    Trial,
    attributes_of,
    is_plain,
    settings_of,
    without_hooks,
)

_CODE = (types.FunctionType, types.BuiltinFunctionType, type)


@dataclass(frozen=True)
class OwnStep:
    """How the optimizers of a class step on the workers.

    Attributes:
        pickled_class: The class.
        attributes: Plain attributes of the optimizer.
        needs_whole: Whether a step needs whole parameters; else each element is computed from those at its place.
        multiplies: Whether a step multiplies matrices.
        takes_closure: Whether a step with a closure is a call of that, and then a step.
        variables: Those outside of the optimizer that it reads, with their values.
        names: All names in its code: workers do not know attributes that the script has set on parameters.
        num_groups: How many groups it had: with others it has to be tried again.
        twin: A small copy that shows what a step makes of settings; None where it leaves them as they are.
        gradients: Those of the twin.
    """

    pickled_class: bytes
    attributes: dict[str, Any]
    needs_whole: bool
    multiplies: bool
    takes_closure: bool
    variables: tuple[tuple[Variable, Any], ...]
    names: frozenset[str]
    num_groups: int
    twin: Copy | None = None
    gradients: Sequence[Tensor] = ()

    def check(self, optimizer: Optimizer) -> None:
        """Returns if nothing has changed of what the workers cannot know.

        Raises:
            Refused: Something has.
        """
        for variable, value in self.variables:
            if variable.value() != value:
                raise Refused(f"reads {variable.name}, which has changed")
        if attributes_of(optimizer) != self.attributes:
            raise Refused("has other attributes than at its first step")
        _check_parameters(optimizer, self.names)

    def advance(self, optimizer: Optimizer) -> None:
        """Makes of the settings of an optimizer's groups what a step makes of them, as the workers do."""
        if self.twin is None:
            return
        self.twin.set([settings_of(group) for group in optimizer.param_groups])
        self.twin.take(self.gradients)
        for group, settings in zip(optimizer.param_groups, self.twin.settings):
            group.update(settings)


def own_step_of(optimizer: Optimizer, step: Step) -> OwnStep:
    """Returns how an optimizer steps on the workers, from a few steps of copies.

    Args:
        optimizer: One with parameters.
        step: Its class's `step`, without hooks.

    Raises:
        Refused: It has to step in the script's process.
    """
    if type(optimizer).add_param_group is not Optimizer.add_param_group:
        raise Refused("has an add_param_group of its own")
    read, written, in_code = used_by_method(type(optimizer), step)
    if written:
        raise Refused(f"changes the variable {written[0].name}")
    for variable in read:
        if not (is_plain(variable.value()) or isinstance(variable.value(), _CODE)):
            raise Refused(f"reads the variable {variable.name}, of type {type(variable.value()).__name__}")
    variables = tuple((variable, variable.value()) for variable in read)
    names = in_code - OWN_ATTRIBUTES
    _check_parameters(optimizer, names)
    trial = Trial(optimizer, step)
    needs_whole = trial.needs_whole()
    twin, gradients = trial.twin() if trial.changes_settings else (None, [])
    with without_hooks(type(optimizer)):
        try:
            pickled_class = cloudpickle.dumps(type(optimizer))
        except Exception as error:  # of whatever the class, or a function that it names, has
            raise Refused(f"cannot be sent: {error}") from error
    attributes, takes_closure = attributes_of(optimizer), trial.takes_closure()
    num_groups = len(optimizer.param_groups)
    found = (needs_whole, trial.multiplies(), takes_closure)
    return OwnStep(pickled_class, attributes, *found, variables, names, num_groups, twin, gradients)


def _check_parameters(optimizer: Optimizer, names: frozenset[str]) -> None:
    """Returns if no parameter has an attribute of one of the names.

    Raises:
        Refused: One has.
    """
    for group in optimizer.param_groups:
        if not all(map(names.isdisjoint, map(vars, group["params"]))):
            read = next(name for one in group["params"] for name in vars(one) if name in names)
            raise Refused(f"reads the attribute {read} of a parameter")
