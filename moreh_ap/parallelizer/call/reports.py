"""What a forward leaves besides its result: what hooks of the script were given, and attributes that it set.

Decides what of it is answered with the result. Must not know who asks for it. See the notes in `hook_records.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.call.extension import CallExtension, Findings, Forward
from moreh_ap.parallelizer.data.fsdp import recover
from moreh_ap.parallelizer.observation.hook_moments import Moments
from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.protocol.hook_records import AT, IN_PLACE, RECORDER, HookEnded, Report, ReportedHook, ReportKey
from moreh_ap.protocol.module_attributes import (
    Attributes,
    has_memory,
    is_overwritten,
    is_same_container,
    num_leaves,
)
from moreh_ap.protocol.pytree import flatten


class Reports(CallExtension):
    """Answers what hooks were given and what attributes were set as further leaves of the result.

    Args:
        module: The model.
        attributes: Its attributes; None where what is set on parts of the model is not what one device would set.
        known: The attributes that may be answered, and the kinds of their leaves; None for all.
        answers: Whether what hooks find in buffers is what one device would find.
    """

    def __init__(
        self,
        module: nn.Module,
        attributes: Attributes | None,
        known: Mapping[str, tuple[str, ...]] | None = None,
        answers: bool = True,
    ) -> None:
        self._module, self._attributes, self._known, self._answers = module, attributes, known, answers
        self._among = None if known is None else {ReportKey.of(name).name for name in known}
        self.has_hooks = any(
            isinstance(hook, ReportedHook)
            for submodule in module.modules()
            for hook in (*submodule._forward_hooks.values(), *submodule._forward_pre_hooks.values())
        )
        self.is_needed = self.has_hooks or attributes is not None

    def knowing(self, attributes: Mapping[str, tuple[str, ...]]) -> Reports:
        kinds = {name: self._kinds_of(name, found) for name, found in attributes.items()}
        return Reports(self._module, self._attributes, kinds, self._answers)

    def _kinds_of(self, name: str, found: tuple[str, ...]) -> tuple[str, ...]:
        """Buffers are the same everywhere; what one is while a hook runs may be zero, which shows no kind."""
        return ("same",) * len(found) if self._is_of_buffer(name) else found

    def _is_of_buffer(self, name: str) -> bool:
        """Whether an attribute is the copy of a buffer that a hook has read."""
        key = ReportKey.of(name)
        path, _, last = key.name.rpartition(".")
        return key.is_passing and last in self._module.get_submodule(path)._buffers

    def around_forward(self, findings: Findings, module: nn.Module, forward: Forward) -> Forward:
        """Returns a forward whose result is a `Report` where there is anything to report.

        Raises, when it runs:
            UnsupportedError: A tensor that a hook was given was changed in place afterwards.
        """
        attributes = self._attributes if module is self._module else None

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            before = {} if attributes is None else attributes.marks()
            seen: list[dict[int, tuple[Any, ...]]] = []
            ended_by, moments = None, None
            if self.has_hooks:
                if self._answers and module is self._module:
                    moments = Moments(module, attributes, before, self._among)
                result, seen, ended_by = _with_hooks(lambda: forward(args, kwargs), moments)
            else:
                result = forward(args, kwargs)
            changed = {} if attributes is None else attributes.changed(before)
            passing = {} if moments is None else moments.at_hooks(changed)
            found = {name: value for name, value in {**changed, **passing}.items() if self._is_answered(name, value)}
            findings.left_out = [name for name in (*changed, *passing) if name not in found]
            kept = [name for name, value in changed.items() if is_same_container(value, before.get(name))]
            findings.gathered = [name for name in kept if not is_overwritten(changed[name], before[name])]
            if ended_by is not None:
                recover(module)
            if not self.has_hooks and not (found if self._known is None else self._known):
                return result  # where the kinds are known of a `Report`, it stays one that may have no attribute
            findings.num_own = len(flatten(result)[0])
            findings.attributes = {name: len(flatten(value)[0]) for name, value in found.items()}
            if self._known is not None:
                findings.attribute_kinds = tuple(kind for name in found for kind in self._known[name])
            since = {} if moments is None else moments.from_hook(changed)
            named = {_key(name, kept, since): value for name, value in found.items()}
            return Report(result, seen, ended_by, named)

        return run

    def _is_answered(self, name: str, value: Any) -> bool:
        number = num_leaves(value)
        is_of_kind = self._known is None or (name in self._known and number == len(self._known[name]))
        is_known = number is not None and is_of_kind
        if self._is_of_buffer(name) or (self._attributes is not None and name in self._attributes.buffers):
            return is_known
        return is_known and not any(map(self._is_state, flatten(value)[0]))

    def _is_state(self, leaf: Any) -> bool:
        """Whether a value is a parameter or buffer in another tensor (`weight.detach()`): it changes with steps, and
        what would come back from the script does not."""
        is_plain = isinstance(leaf, Tensor) and leaf.grad_fn is None and has_memory(leaf) and leaf.numel() > 0
        return is_plain and (leaf.data_ptr(), leaf.numel()) in self._state

    @functools.cached_property
    def _state(self) -> set[tuple[int, int]]:
        tensors = (*self._module.parameters(), *self._module.buffers())
        held = [local_shard(tensor) for tensor in tensors if not tensor.is_meta]
        return {(tensor.data_ptr(), tensor.numel()) for tensor in held}


def _key(name: str, kept: Sequence[str], since: Mapping[str, str]) -> str:
    plain, at, position = name.partition(AT)
    return plain + (IN_PLACE if plain in kept else "") + (at + position if at else since.get(plain, ""))


def _with_hooks(
    run: Callable[[], Any], moments: Moments | None
) -> tuple[Any, list[dict[int, tuple[Any, ...]]], str | None]:
    """Returns the result of `run`, what hooks of the script were given in it, and what ended it early."""
    seen: list[tuple[int, tuple[Any, ...], list[tuple[Tensor, int]]]] = []
    RECORDER.seen, RECORDER.moments = seen, moments
    ended_by, result = None, None
    try:
        result = run()
    except HookEnded as ended:
        ended_by = str(ended)
    finally:
        RECORDER.seen, RECORDER.moments = None, None
    for _, _, tensors in seen:
        for tensor, version in tensors:
            if tensor._version != version:
                raise _changed_in_place(tensor)
    return result, [{number: given} for number, given, _ in seen], ended_by


def _changed_in_place(tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"A hook was given a tensor of shape {tuple(tensor.shape)} that is changed in place afterwards.",
        allowed="Hooks on modules whose inputs and outputs stay as they are: nn.ReLU(inplace=False), x = x + y.",
        fix="module.inplace = False  # of the nn.ReLU behind the hooked module",
    )
