"""Numbers of rows that a script keeps on its model or beside it, and reads in the forward: ``self.batch_size``.

Decides which numbers may be such, and what a forward of other rows finds in their place. Whether they are is for
`split_check.py` to find out.

[Note: kept numbers]
``torch.zeros(1, self.batch_size, 6)`` has as many entries as one device's batch, whatever a worker computes. Where a
forward cannot be split as it is written, it is tried with other values in place of attributes, and of variables of the
script, that are as large as the batch: the number of rows that run. One that means something else (a width that
happens to be 32) makes outputs or gradients of few rows other ones than of one row, and then it is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.parallelizer.call.extension import CallExtension, Findings, Forward
from moreh_ap.protocol.module_attributes import own_attributes
from moreh_ap.protocol.script_code.script_globals import read_by
from moreh_ap.protocol.script_code.value_forms import is_of_script, is_record

_MOST_TRIED = 4


@dataclass(frozen=True)
class KeptRows(CallExtension):
    """Sets such numbers to the number of rows that a forward computes, and back afterwards.

    Args:
        names: Of attributes and variables, without what has them.
        rows: Rows of the batch, as which they are known.
        shapes: Of the arguments' tensors as the whole batch has them, in order.
    """

    names: frozenset[str]
    rows: int
    shapes: tuple[torch.Size, ...]

    def around_forward(self, findings: Findings, module: nn.Module, forward: Forward) -> Forward:
        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            with self._set(module, self._rows_of(shapes_of(args, kwargs))):
                return forward(args, kwargs)

        return run

    def _rows_of(self, shapes: tuple[torch.Size, ...]) -> int:
        """Returns how many rows run: what a tensor has where it has not all of them."""
        for own, whole in zip(shapes, self.shapes, strict=False):
            for entries, all_entries in zip(own, whole, strict=False):
                if all_entries == self.rows and entries != all_entries:
                    return entries
        return self.rows

    @contextlib.contextmanager
    def _set(self, module: nn.Module, rows: int) -> Iterator[None]:
        places = [(holder, name) for holder, name in _places(module, self.rows) if name in self.names]
        for holder, name in places:
            holder[name] = rows
        try:
            yield
        finally:
            for holder, name in places:
                holder[name] = self.rows


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Size, ...]:
    """Returns the shapes of the tensors among arguments, in order."""
    return tuple(leaf.shape for leaf in tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor))


def may_be_kept(module: nn.Module, rows: int) -> list[frozenset[str]]:
    """Returns the names of what may be kept numbers of rows, in the combinations that are worth trying."""
    names = list(dict.fromkeys(name for _, name in _places(module, rows)))
    each = [frozenset([name]) for name in names[:_MOST_TRIED]]
    return [frozenset(names), *each] if len(names) > 1 else each


def _places(module: nn.Module, rows: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields dictionaries with a number as large as the batch, and its name there."""
    holders: dict[int, dict[str, Any]] = {}
    for submodule in module.modules():
        if any(is_of_script(kind.__module__) for kind in type(submodule).__mro__):  # FSDP2 derives another class
            holders[id(vars(submodule))] = vars(submodule)
            records = (value for value in own_attributes(submodule).values() if is_record(value))
            holders.update((id(vars(record)), vars(record)) for record in records)
    for variable in read_by(module):
        if isinstance(variable.holder, dict):
            value = variable.value()
            if is_record(value):
                holders[id(vars(value))] = vars(value)
            elif _is(value, rows) and variable.name in variable.holder:
                yield variable.holder, variable.name
    for holder in holders.values():
        yield from [(holder, name) for name, value in holder.items() if _is(value, rows)]


def _is(value: Any, rows: int) -> bool:
    return type(value) is int and value == rows
