"""What the controller knows of a call before its answer arrives: ids of its constant parts, its result's structure.

A call's *signature* is where it goes, how its arguments nest, and its leaves that are not tensors. Its *structure* is
how the result nests and the shape of every tensor in it; it is learnt from the workers' first answer and predicted
after.
"""

from __future__ import annotations

import functools
import math
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from moreh_ap import log
from moreh_ap.errors import UnsupportedError
from moreh_ap.integrations.transformers_worker import contains_cache
from moreh_ap.protocol.batch import BatchRows
from moreh_ap.protocol.hook_records import Report
from moreh_ap.protocol.memory_format import Order, empty_in_order
from moreh_ap.protocol.messages.calls import DefineSignature, ForwardReply
from moreh_ap.protocol.messages.tensors import LeafReply, TensorSlot
from moreh_ap.protocol.pytree import flatten, pickle_treespec, unpickle_treespec
from moreh_ap.session.outbox import Outbox

_MAX_STRUCTURES = 4096


@dataclass(frozen=True)
class LeafTemplate:
    """What is known of one output before its value is: its global shape, and how workers' parts make the whole."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    differentiable: bool
    constant: Any = None
    is_operand: bool = False
    order: Order = ()

    def promised(self) -> tuple[Any, ...]:
        """What a script sees of the leaf at once."""
        return (self.kind == "const", self.shape, self.dtype, self.differentiable, self.constant)

    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype is not None else 0)

    @functools.cached_property
    def meta(self) -> Tensor:
        """The whole tensor without values, its dims in memory as on one device."""
        return empty_in_order(self.shape, self.order, self.dtype, "meta")


@dataclass(frozen=True)
class Structure:
    """How a call's result nests, what its leaves are, whether the call drew random numbers, and who had which rows.

    Attributes:
        attributes: Those that the forward set: their values are the last of the leaves.
        is_report: Whether the result is a `Report`: hooks of the script saw something, or attributes were set.
        has_cache: Whether a key-value cache of transformers is in the result.
    """

    treespec: TreeSpec
    leaves: tuple[LeafTemplate, ...]
    mode: str
    note: str
    draws: bool
    batch: BatchRows | None
    attributes: tuple[str, ...] = ()
    is_report: bool = False
    has_cache: bool = False

    @staticmethod
    def of(replies: list[ForwardReply | None]) -> Structure:
        """Join the answers of all workers that have a result, in rank order."""
        answered = [reply for reply in replies if reply is not None]
        leaves = []
        for own_leaves in zip(*(reply.leaves for reply in answered)):
            first: LeafReply = own_leaves[0]
            if first.kind == "const":
                leaves.append(LeafTemplate("const", (), None, False, pickle.loads(first.data or b"")))
                continue
            shape = first.shape
            if first.kind == "rows":
                shape = (sum(leaf.shape[0] for leaf in own_leaves), *first.shape[1:])
            leaves.append(
                LeafTemplate(
                    first.kind,
                    shape,
                    first.dtype,
                    first.differentiable,
                    is_operand=first.is_operand,
                    order=first.order,
                )
            )
        first_answer = answered[0]
        local_rows = tuple(None if reply is None else reply.rows for reply in replies)
        treespec = unpickle_treespec(first_answer.pickled_treespec)
        return Structure(
            treespec,
            tuple(leaves),
            first_answer.mode,
            first_answer.note,
            draws=any(reply.streams is not None for reply in answered),
            batch=None if first_answer.rows is None else BatchRows(local_rows),
            attributes=tuple(treespec.children()[-1].context) if treespec.context is Report else (),
            is_report=treespec.context is Report,
            has_cache=contains_cache(treespec),
        )

    def promises_the_same(self, other: Structure) -> bool:
        """True if a script could not tell results of the two apart before reading a value, but for attributes."""
        (nesting, leaves), (other_nesting, other_leaves) = self._without_attributes(), other._without_attributes()
        # A named tuple that `forward` defines anew has another class in each result.
        nest_alike = nesting == other_nesting or repr(nesting) == repr(other_nesting)
        return nest_alike and [leaf.promised() for leaf in leaves] == [leaf.promised() for leaf in other_leaves]

    def _without_attributes(self) -> tuple[list[TreeSpec], tuple[LeafTemplate, ...]]:
        """How the result and what hooks were given nest, and the leaves of both."""
        if self.treespec.context is not Report:
            return [self.treespec], self.leaves
        result, seen, ended_by, _ = self.treespec.children()
        no_hook_ran = seen.num_leaves == 0 and self.leaves[result.num_leaves].constant is None
        nesting = [result] if no_hook_ran else [result, seen, ended_by]
        return nesting, self.leaves[: sum(spec.num_leaves for spec in nesting)]

    def predictable(self) -> bool:
        """True if another call of the same signature must give the same structure.

        No leaf is a computed number, and no attribute is set: that may depend on everything.
        """
        constants = (leaf.constant for leaf in self.leaves if leaf.kind == "const")
        return not self.attributes and all(constant is None for constant in constants)


class Signature(NamedTuple):
    """The constant part of a call, as workers know it.

    Attributes:
        number: Its number on the workers.
        times_forgotten: The outbox's count when it was defined: workers know it while that stays.
        takes_cache: Whether a key-value cache of transformers is among the arguments.
    """

    number: int
    times_forgotten: int
    takes_cache: bool


class Signatures:
    """What one model knows of its calls: ids of their constant parts, and structures seen so far.

    Args:
        outbox: How the workers are told.
        owner: The model's name on the workers.

    Attributes:
        structures: The structures of calls by their keys, see `remote_call.RemoteCall.send`.
        numbers: Signatures with plain constants, by what tells them apart.
        sets_attributes: Whether a forward has set attributes so far.
    """

    def __init__(self, outbox: Outbox, owner: str) -> None:
        self._outbox, self._owner = outbox, owner
        self.structures: dict[Any, Structure] = {}
        self.numbers: dict[Any, Signature] = {}
        self._unpredictable: set[Any] = set()
        self._attributes: set[str] = set()
        self.sets_attributes = False
        self._notes: set[str] = set()

    def define(self, path: str, args: Any, kwargs: Any) -> tuple[Signature, list[Tensor]]:
        """The signature of a call, which workers learn of the first time, and the tensors among its arguments.

        Raises:
            UnsupportedError: A random number generator is among the arguments, or one that cannot be sent.
        """
        leaves, treespec = flatten((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise UnsupportedError(
                "A torch.Generator was passed to a model: workers would draw from copies, and this one stays as it is.",
                allowed="Random numbers of the accelerator's own stream in forward(), or drawn before the call.",
                fix="noise = torch.randn(shape, generator=generator, device='cuda'); model(x, noise)",
            )
        constants = [TensorSlot() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        owner, nesting, values = self._owner, pickle_treespec(treespec), pickle_constants(constants)
        number = self._outbox.define(
            (owner, path, nesting, values), lambda number: DefineSignature(number, owner, path, nesting, values)
        )
        signature = Signature(number, self._outbox.times_forgotten, contains_cache(treespec))
        return signature, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def learn(self, key: Any, structure: Structure, *, grad: bool) -> None:
        """Remember the structure of the calls with `key`; say once in the log why a training batch is not shared."""
        if grad and structure.note and structure.note not in self._notes:
            self._notes.add(structure.note)
            print(log.info(structure.note), flush=True)
        if not self._attributes.issuperset(structure.attributes):
            self.structures.clear()  # calls that set it to None, as it was, are to be looked at again
            self._attributes.update(structure.attributes)
            self.sets_attributes = True
        if structure.predictable() and key not in self._unpredictable:
            if len(self.structures) >= _MAX_STRUCTURES:
                self.structures.clear()
            self.structures[key] = structure

    def never_predict(self, key: Any) -> None:
        """The structure of a call with `key` turned out to be another than that of an earlier one."""
        self.structures.pop(key, None)
        self._unpredictable.add(key)


def pickle_constants(constants: list[Any]) -> bytes:
    """The leaves of a call that are not tensors, as they travel."""
    try:
        return pickle.dumps(constants)
    except (pickle.PicklingError, TypeError, AttributeError):
        return cloudpickle.dumps(constants)
