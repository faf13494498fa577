"""Learns where rows meet in a forward: a few rows run together, and each function also on two slices of them.

Decides which functions work row by row, of which the slices' results add up, and which need the rows gathered
(`data.row_gathering`). Must not know why a forward is tried or whether what was learned is right for the whole of it;
`joined_probe.py` shows that.

[Note: numbers]
A forward may ask a tensor how many rows it has and do something with that number: make as many labels, divide by it.
Such numbers are found by running fewer rows before: both runs have the same multiple of the number of rows, or nearly
that (`len(x) - 1`, by which a covariance is divided). In a call they are left as they are, or made those of the whole
batch, as the comparison shows. Others follow the number of rows in another way, `int(1.25 * len(x) / experts)`: they
differ for fewer rows, and are the same for as many other rows. They are those of the whole batch, which is run for them
(`gathering_probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_rules import LENGTHS, MeanRules
from moreh_ap.parallelizer.observation.call_sites import GATHERING, is_called_by, is_in_function_of_script, site_of_call
from moreh_ap.parallelizer.observation.filled_arguments import FilledArguments
from moreh_ap.parallelizer.observation.module_calls import Original, module_step, seeing_modules
from moreh_ap.parallelizer.observation.recorded_calls import Called
from moreh_ap.parallelizer.observation.row_functions import DRAWS
from moreh_ap.parallelizer.observation.torch_calls import function_name, is_question, leaves_of, tensors_of
from moreh_ap.parallelizer.rng.policy import streams_untouched
from moreh_ap.parallelizer.rng.shared_draws import Draw
from moreh_ap.parallelizer.row_dims.dealt_modules import dealt_along
from moreh_ap.parallelizer.row_dims.own_entries import Entries
from moreh_ap.parallelizer.row_dims.placements import Placements
from moreh_ap.parallelizer.row_dims.row_numbers import RowCount
from moreh_ap.parallelizer.row_dims.row_steps import SHARE, Placement, Rows, Step
from moreh_ap.parallelizer.surroundings.placement import OwnDevice
from moreh_ap.parallelizer.trial.dry_run import Refused, state_restored
from moreh_ap.parallelizer.trial.function_trial import Double, Trial, cut, with_numbers
from moreh_ap.parallelizer.trial.row_comparison import close

_HARMLESS = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Arguments of a module that a second call of it finds as they were; not so a cache."""
_ADDED = (-2, -1, 0, 1)
"""To a multiple of the number of rows: two views of a batch without a row itself, degrees of freedom, N x N matrices
without their diagonal. Others may follow something else, such as a place in a queue."""
_REFUSED = {"backward", "grad", "__set__"}


class KeptInside(Exception):
    """A module that was taken as one step has kept a tensor of its inside, which others go on with.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Lockstep(GlobalReduction):
    """Runs a forward of some rows, and finds out what each function in it does with slices of them.

    Args:
        device: This worker's device.
        rows: How many rows each slice has; all of them run.
        dims: For each leaf of the arguments where it has rows; None: nowhere.
        fewer: How many rows ran before, and what they called.
        others: What as many other rows called.
        tolerance: Which differences are rounding; see `row_comparison.py`.
        rules: Which numbers in modules are those of the batch.
        draws: What is drawn from the common stream.
        enters: Modules that are no step, whose functions are steps.
        entries: Which arguments number the entries of rows. See `own_entries.py`.

    Attributes:
        steps: What was learned so far.
        ends: Behind how many steps the forward was through with a module that has parameters and works row by row,
            and that module.
        meets_in_function: Whether rows met in the forward of a `torch.autograd.Function` of the script.
    """

    meets_in_function = False

    def __init__(
        self,
        device: torch.device,
        *,
        rows: tuple[int, int],
        dims: Sequence[int | None],
        fewer: tuple[int, Sequence[Called]],
        tolerance: float,
        others: Sequence[Called] = (),
        rules: MeanRules = LENGTHS,
        draws: Sequence[Draw] = (),
        enters: Collection[nn.Module] = (),
        entries: Entries = (),
    ) -> None:
        super().__init__(device, record=True, rules=rules)
        self._enters, self._of_steps = enters, Placements()
        self._step: nn.Module | None = None
        self.steps: list[Step] = []
        self.ends: list[tuple[int, nn.Module]] = []
        self._rows, self._within = rows, (rules, draws)
        self._dims, self._entries = dims, entries
        self._num_fewer, self._fewer_calls = fewer
        self._other_calls = others if len(others) == len(self._fewer_calls) else ()
        self._tolerance = tolerance
        self._position = 0
        self._is_of_sharding = False
        self._doubles, self._made = Placements(), Placements()
        self._inside: bool | None = None
        """In a module that works row by row, whether its means over dim 0 are means over the batch."""

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for leaf, dim in zip(tree_leaves((args, kwargs)), self._dims, strict=True):
            if dim is not None:
                self._set_rows(leaf, Rows(dim))
        leaves = tree_leaves((args, kwargs))
        for place, other in self._entries:
            double = self._doubles.get(leaves[place])
            assert double is not None
            first, second = double.slices
            shift = self._rows[0] * leaves[other].shape[1]
            self._doubles[leaves[place]] = replace(double, slices=(first, second - shift), shift=shift)
        return args, kwargs

    def __enter__(self) -> Lockstep:
        self._modules = seeing_modules(self._call_module)
        self._modules.__enter__()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self._modules.__exit__(exc_type, exc_value, traceback)
        super().__exit__(exc_type, exc_value, traceback)

    def _set_rows(self, tensor: Tensor, placement: Rows) -> None:
        self._doubles[tensor] = cut(tensor, placement, self._rows)

    def _run(self, takes_means: bool, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function; see `GatheringReduction`."""
        if takes_means:
            return super().__torch_function__(func, (), args, kwargs)
        return OwnDevice.__torch_function__(self, func, (), args, kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside is not None:
            result = self._run(self._inside, func, args, kwargs)
            for leaf in tensors_of(result):
                self._of_steps[leaf] = self._step
            return result
        if is_question(func):
            return func(*args, **kwargs)
        name = function_name(func)
        if name in _REFUSED:
            raise Refused(f"the forward calls {name}, and rows depend on each other")
        leaves = leaves_of((args, kwargs))
        self._is_of_sharding = is_called_by(GATHERING)
        doubles = self._doubles_of(leaves)
        follows: tuple[RowCount, ...] = ()
        if not self._is_of_sharding:
            follows = self._following(name, leaves)
            self._position += 1
        elif not any(doubles):
            return OwnDevice.__torch_function__(self, func, types, args, kwargs)
        if not any(doubles) or name.startswith("new_"):
            result = OwnDevice.__torch_function__(self, func, types, args, kwargs)
            step = self._of_one_device(func, args, kwargs, follows, result) if follows else Step(name)
            self._note(step, leaves, doubles)
            self._note_made(name, leaves, result)
            return result
        trial = self._trial(func, name, (args, kwargs), doubles, follows)
        step, result, found = trial.decide()
        self._note(step, leaves, doubles)
        self._place(result, found)
        return result

    def _call_module(self, call: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside is not None:
            return call(*args, **kwargs)
        self._is_of_sharding = False
        name = module_step(module)
        leaves = leaves_of((args, kwargs))
        follows = self._following(name, leaves)
        after = self._fewer_calls[self._position].after
        self._position += 1
        doubles = self._doubles_of(leaves)
        is_step = module not in self._enters and all(isinstance(leaf, _HARMLESS) for leaf in leaves)
        if any(doubles) and is_step:
            self._inside, self._step = False, module
            try:
                trial = self._trial(call, name, (args, kwargs), doubles, follows)
                with state_restored(module):  # with gradients as in the call: a module may ask whether there are any
                    learned = trial.decide_on_module()
                if learned is not None:
                    step, found = learned
                    self._inside, filled = trial.takes_means, FilledArguments((args, kwargs), (args, kwargs))
                    result = call(*args, **kwargs)
                    if {*map(id, filled.added())} - {*map(id, tensors_of(result))}:
                        raise Refused(f"{type(module).__name__} puts into its arguments what it does not return")
                    self._position = after
                    self._note(step, leaves, doubles)
                    self._place(result, found)
                    self.ends += [(len(self.steps), module)] if any(True for _ in module.parameters()) else []
                    return result
                deals = self._dealt(call, module, (args, kwargs), doubles) if not follows else None
                if deals is not None:
                    result = call(*args, **kwargs)
                    self._position = after
                    self._note(Step(name, adds_up=True, deals=deals, results=(None,)), leaves, doubles)
                    self._place(result, [None])
                    return result
            finally:
                self._inside = None
        self._note(Step(name, enters=True), leaves, doubles)
        return call(*args, **kwargs)

    def _trial(
        self,
        func: Callable[..., Any],
        name: str,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        doubles: Sequence[Double | None],
        follows: tuple[RowCount, ...],
    ) -> Trial:
        given = arguments, doubles, follows, self._within, self._made
        return Trial(self.device, self._rows, self._tolerance, func, name, *given)

    def _note_made(self, name: str, leaves: Sequence[Any], result: Any) -> None:
        """Keeps results that are made of numbers alone, such as zeros, or of tensors that are."""
        takes_no_values = name.startswith("new_") or name.endswith("_like")
        given = [] if takes_no_values else [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        are_made = all(self._made.get(leaf) is not None for leaf in given)
        for leaf in tensors_of(result):
            if are_made:
                self._made[leaf] = True
            else:
                self._made.forget(leaf)

    def _dealt(
        self, call: Original, module: nn.Module, arguments: Any, doubles: Sequence[Double | None]
    ) -> Rows | None:
        """Returns where the result of a module that gets a summand has the entries that the sum has along dim 0, if
        each worker may compute some of them; None if not."""
        if any(double is not None and double.placement != SHARE for double in doubles):
            return None
        if not any(True for _ in module.parameters()):
            return None
        device = self.device if self.device.type == "cuda" else None
        with streams_untouched(device), state_restored(module):
            return dealt_along(call, arguments, lambda one, other: close(one, other, self._tolerance))

    def _note(self, step: Step, leaves: Sequence[Any], doubles: Sequence[Double | None]) -> None:
        """Keeps a step with the place at which the forward took it."""
        placements = [None if double is None else double.placement for double in doubles]
        given = tuple(place for leaf, place in zip(leaves, placements, strict=True) if isinstance(leaf, Tensor))
        is_of_sharding = self._is_of_sharding
        self.meets_in_function = self.meets_in_function or (step.meets and is_in_function_of_script())
        self.steps.append(replace(step, site=site_of_call(), given=given, is_of_sharding=is_of_sharding))

    def _place(self, result: Any, found: Sequence[Double | None]) -> None:
        """Keeps what two workers have in place of a result."""
        for leaf, double in zip(tensors_of(result), found, strict=False):  # what is written to has its doubles
            self._made.forget(leaf)
            self._of_steps.forget(leaf)
            if double is None:
                self._doubles.forget(leaf)
            else:
                self._doubles[leaf] = double

    def _doubles_of(self, leaves: Sequence[Any]) -> list[Double | None]:
        doubles = [self._doubles.get(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        for leaf, double in zip(leaves, doubles, strict=True):
            module = self._of_steps.get(leaf) if isinstance(leaf, Tensor) and double is None else None
            if module is not None and not self._is_of_sharding:
                raise KeptInside(module)
        return doubles

    def _following(self, name: str, leaves: Sequence[Any]) -> tuple[RowCount, ...]:
        """Returns which numbers follow the number of rows, and how."""
        called = self._fewer_calls[self._position] if self._position < len(self._fewer_calls) else None
        if called is None or called.name != name or len(called.numbers) != len(leaves):
            raise Refused("which functions the forward calls depends on the number of rows, and rows on each other")
        counts = []
        for position, (leaf, fewer) in enumerate(zip(leaves, called.numbers, strict=True)):
            if type(leaf) in (int, float) and fewer not in (None, leaf):
                multiple, rest = divmod(leaf - fewer, sum(self._rows) - self._num_fewer)
                added = leaf - multiple * sum(self._rows)
                if rest == 0 and multiple > 0 and added in _ADDED:
                    counts.append(RowCount(position, int(multiple), int(added)))
                elif self._other_calls and self._other_calls[self._position].numbers[position:][:1] == [fewer]:
                    counts.append(RowCount(position, 0, leaf))
        return tuple(counts)

    def _of_one_device(
        self, func: Callable[..., Any], args: Any, kwargs: Any, follows: tuple[RowCount, ...], result: Any
    ) -> Step:
        """Returns the step of a function that gets numbers of rows and no rows; gives its results their rows."""
        name, total = function_name(func), sum(self._rows)
        if name in DRAWS:
            return self._drawn(name, follows, result)
        fewer = with_numbers((args, kwargs), follows, self._num_fewer)
        placements: list[Placement] = []
        try:
            with torch.no_grad():
                small = OwnDevice.__torch_function__(self, func, (), *fewer)
        except (RuntimeError, ValueError, IndexError):
            small = None  # as for a tensor of one device that is viewed: its entries are those of the whole batch
        for leaf, other in zip(tensors_of(result), tensors_of(small) or tensors_of(result), strict=True):
            grown = [dim for dim in range(leaf.ndim) if leaf.shape[dim] != other.shape[dim]]
            placement = Rows(grown[0]) if grown and leaf.shape[grown[0]] % total == 0 else None
            if placement is not None:
                self._set_rows(leaf, placement)
            placements.append(placement)
        return Step(name, follows=follows, for_all=True, cuts=True, results=tuple(placements))

    def _drawn(self, name: str, follows: tuple[RowCount, ...], result: Tensor) -> Step:
        """Returns the step of a function that draws numbers for all rows: a worker draws those of its own, or, where it
        draws as many for any rows (some of their places), what one device draws."""
        sizes = {count.of(sum(self._rows)) for count in follows if not count.is_of_one_size}
        dims = [dim for dim, size in enumerate(result.shape) if size in sizes]
        if name.startswith("randint") and not dims:
            return Step(name, follows=follows, for_all=True, results=(None,))
        if len(dims) != 1:
            raise Refused(f"which dim of what {name} draws has the rows is not clear, and rows depend on each other")
        self._set_rows(result, Rows(dims[0]))
        return Step(name, follows=follows, results=(Rows(dims[0]),))
