"""The part of a forward that depends on its inputs alone, to be computed again for other inputs of the same sizes.

Decides which operations of a forward without values give the denominators of its mean losses, and which answers decide
what the forward does. Must not know what denominators are for, nor who follows a forward.

[Note: kept operations]
While a forward is followed without values (`meta_reduction.py`), labels and masks are real tensors. Kept are the
operations that add a denominator, those that read a number of the inputs into Python (``if mask.all():``), and all that
lead to either. For other inputs these few are computed again. Where each number that is read is the one that was
read before, the forward goes the same way, so its result has the same shapes and its denominators are these.

Nothing is kept of a forward that uses a real tensor which comes neither from its inputs nor from an operation that was
seen, that reads what cannot be compared, or in which numbers of the inputs decide the size of a tensor (``labels[labels
>= 0]``, ``mask.nonzero()``): such operations have no result on meta. If an operation writes into a real tensor, all
operations are kept, since any of them may see what was written; if such a forward reads numbers too, nothing is, since
inputs that lead elsewhere would have been written to before that shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moreh_ap.parallelizer.observation.torch_calls import is_question, leaves_of, map_leaves

_COMPARABLE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""Answers in Python that may be compared. Sizes are questions: they are those of the inputs."""

_MOVES = {Tensor.to, Tensor.cuda, Tensor.cpu}
"""Functions that leave sizes as they are; a tensor on meta cannot be moved to another device."""

Run = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Computes a torch function of positional and keyword arguments."""


@dataclass(frozen=True)
class _Real:
    """A real tensor of the forward, by its number."""

    number: int


@dataclass(frozen=True)
class _Operation:
    """One call of a torch function.

    Attributes:
        function: The torch function.
        args: Positional arguments, with `_Real` for real tensors.
        kwargs: Keyword arguments, likewise.
        results: The numbers of the real tensors among the leaves of the result; None for other leaves.
        is_read: Whether the result was read into Python.
        answer: The result, if so.
        adds_denominators: Whether the operation takes a mean over the batch.
        depends: Whether any argument depends on the inputs; other results are the same for all inputs.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    is_read: bool
    answer: Any
    adds_denominators: bool
    depends: bool

    def given(self) -> set[int]:
        """Returns the numbers of the real tensors among the arguments."""
        return {leaf.number for leaf in leaves_of((self.args, self.kwargs)) if isinstance(leaf, _Real)}


@dataclass(frozen=True)
class InputOperations:
    """The operations of a forward that are computed again. See [Note: kept operations].

    Attributes:
        inputs: The number of each tensor among the leaves of the arguments, None for other leaves.
        operations: What is computed, in order.
        reads: Whether any answer decides what the forward does.
    """

    inputs: tuple[int | None, ...]
    operations: tuple[_Operation, ...]
    reads: bool

    def run(self, leaves: Sequence[Any], compute: Run) -> bool:
        """Computes the operations for other inputs; returns whether the forward does with them what it did before.

        Args:
            leaves: The leaves of the arguments.
            compute: Computes each operation, and notes the denominators.
        """
        values = {number: leaf for number, leaf in zip(self.inputs, leaves, strict=True) if number is not None}

        def fill(leaf: Any) -> Any:
            return values[leaf.number] if isinstance(leaf, _Real) else leaf

        for one in self.operations:
            result = compute(one.function, map_leaves(fill, one.args), map_leaves(fill, one.kwargs))
            if one.is_read and result != one.answer:
                return False
            for number, leaf in zip(one.results, leaves_of(result)):
                if number is not None:
                    values[number] = leaf
        return True


class InputOperationRecorder:
    """Notes the operations of a forward that is followed without values.

    Args:
        leaves: The leaves of its arguments.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._next = 0
        self._operations: list[_Operation] = []
        self._num_sites = 0
        self._writes = False
        self._is_complete = True
        self._inputs = tuple(self._number(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves)
        self._dependent: set[int | None] = {number for number in self._inputs if number is not None}

    def observe(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Run,
        sites: Sequence[Any],
    ) -> Any:
        """Returns the result of a torch function, and notes the call where it is one of those that are kept.

        Args:
            func: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            compute: Computes it.
            sites: The denominators so far; `compute` adds to them.
        """
        if is_question(func) or not self._is_complete:
            return compute(func, args, kwargs)
        real = [leaf for leaf in leaves_of((args, kwargs)) if _is_real(leaf)]
        kept_args, kept_kwargs = map_leaves(self._named, args), map_leaves(self._named, kwargs)
        versions, num_sites = [tensor._version for tensor in real], len(sites)
        result = compute(func, args, kwargs)
        writes = versions != [tensor._version for tensor in real]
        leaves = leaves_of(result)
        depends = any(self._numbers.get(tensor) in self._dependent for tensor in real)
        found = tuple(self._number(leaf) if _is_real(leaf) else None for leaf in leaves)
        has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves)
        is_read = bool(real) and not has_tensors and not writes
        adds_denominators = len(sites) > num_sites
        self._num_sites += len(sites) - num_sites
        self._is_complete &= not is_read or all(isinstance(leaf, _COMPARABLE) for leaf in leaves)
        self._is_complete &= getattr(func, "__name__", "") != "__set__"  # of `data`, which no version tells
        if depends and any(number is not None for number in found):
            self._is_complete &= func in _MOVES or _has_fixed_sizes(func, args, kwargs)
        self._writes |= writes
        self._dependent.update(found if depends else ())
        if writes or is_read or adds_denominators or any(number is not None for number in found):
            answer = result if is_read else None
            self._operations.append(
                _Operation(func, kept_args, kept_kwargs, found, is_read, answer, adds_denominators, depends)
            )
        return result

    def operations(self, num_sites: int) -> InputOperations | None:
        """Returns the operations to be computed again; None where those that were seen are not all that matter.

        Args:
            num_sites: How many denominators the forward has.
        """
        reads = any(one.is_read and (one.depends or self._writes) for one in self._operations)
        if not self._is_complete or (self._writes and reads) or self._num_sites != num_sites:
            return None
        kept, needed = [], set[int]()
        for one in reversed(self._operations):
            decides = one.is_read and one.depends
            if self._writes or decides or one.adds_denominators or not needed.isdisjoint(one.results):
                kept.append(one)
                needed |= one.given()
        return InputOperations(self._inputs, tuple(reversed(kept)), reads)

    def _number(self, tensor: Tensor) -> int:
        if tensor not in self._numbers:
            self._numbers[tensor] = self._next
            self._next += 1
        return int(self._numbers[tensor])

    def _named(self, leaf: Any) -> Any:
        if not _is_real(leaf):
            return leaf
        if leaf not in self._numbers:  # an attribute of the model, a tensor that no torch function made
            self._is_complete = False
            return leaf
        return _Real(self._numbers[leaf])


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_meta


def _has_fixed_sizes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether the results of a torch function have the same sizes for all numbers in its arguments.

    On meta, a function that reads a number raises RuntimeError; TypeError where it converts to NumPy, ValueError or
    IndexError where it checks in Python. NotImplementedError, of functions without a meta version, is a RuntimeError.
    """
    placed = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
    try:
        func(*map_leaves(_on_meta, args), **map_leaves(_on_meta, placed))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf
