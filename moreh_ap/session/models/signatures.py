"""Signatures and structures of calls: what the controller knows before the reply arrives.

A call's *signature* is its module, the nesting of its arguments, and the leaves that are not tensors. Its *structure*
is the nesting of the result and the shape of every tensor in it; it is taken from the workers' first reply and
predicted for later calls.
"""

from __future__ import annotations

import functools
import math
import operator
import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from moreh_ap.errors import UnsupportedError
from moreh_ap.integrations.transformers_worker import contains_cache
from moreh_ap.local import logger
from moreh_ap.protocol.batch import BatchRows
from moreh_ap.protocol.hook_records import Report, attributes_in
from moreh_ap.protocol.memory_format import Order, empty_in_order
from moreh_ap.protocol.messages.calls import DefineSignature, ForwardReply
from moreh_ap.protocol.messages.tensors import MAX_INLINE_BYTES, LeafReply, TensorSlot
from moreh_ap.protocol.objects.returned_arguments import Place
from moreh_ap.protocol.pytree import flatten, pickle_for_others, pickle_treespec, unpickle_treespec
from moreh_ap.runtime.relay.worker_values import ItemValues
from moreh_ap.session.outbox import Outbox
from moreh_ap.session.script_line import place

_MAX_STRUCTURES = 4096

_what_a_reply_says = operator.attrgetter("pickled_treespec", "mode", "note", "rows", "returned")
_what_a_leaf_is = operator.attrgetter("kind", "shape", "dtype", "differentiable", "is_operand", "order", "same_as")


@dataclass(frozen=True)
class LeafTemplate:
    """One output before its value is known: its global shape, and how it is put together from the workers' outputs."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    differentiable: bool
    constant: Any = None
    is_operand: bool = False
    order: Order = ()
    same_as: int | None = None

    def promised(self) -> tuple[Any, ...]:
        """Returns what a script can see of the leaf without its value."""
        return (self.kind == "const", self.shape, self.dtype, self.differentiable, self.constant)

    def num_bytes(self) -> int:
        """Size of the full tensor."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype is not None else 0)

    @functools.cached_property
    def is_told(self) -> bool:
        """Whether its value is in the answer, if that is given when everything is computed."""
        return self.kind != "rows" and self.num_bytes() <= MAX_INLINE_BYTES

    @functools.cached_property
    def meta(self) -> Tensor:
        """The full tensor on meta, its dims in memory order as on one device."""
        return empty_in_order(self.shape, self.order, self.dtype, "meta")


@dataclass(frozen=True)
class Structure:
    """The nesting and leaves of a call's result, whether the call drew random numbers, and the rows of each worker.

    Attributes:
        attributes: Attributes that the forward set; their values are the last leaves.
        left_out: Attributes that it set and whose values are not among the leaves.
        is_report: Whether the result is a `Report`, with records of hooks or of attributes that were set.
        has_cache: Whether a key-value cache of transformers is in the result.
        returned: Which argument is the result, if any; see `returned_arguments.py`.
        varies: Whether sizes depend on the values of the arguments.
    """

    treespec: TreeSpec
    leaves: tuple[LeafTemplate, ...]
    mode: str
    note: str
    draws: bool
    batch: BatchRows | None
    attributes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_report: bool = False
    has_cache: bool = False
    returned: Place | None = None
    varies: bool = False

    @staticmethod
    def of(replies: Sequence[ForwardReply | None]) -> Structure:
        """Joins the replies of all workers that have a result, in rank order."""
        answered = [reply for reply in replies if reply is not None]
        first_answer, leaves = answered[0], []
        treespec = unpickle_treespec(first_answer.pickled_treespec)
        is_report = treespec.context is Report  # of hooks, each with tensors of its own
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
                    same_as=None if is_report else first.same_as,
                )
            )
        local_rows = tuple(None if reply is None else reply.rows for reply in replies)
        return Structure(
            treespec,
            tuple(leaves),
            first_answer.mode,
            first_answer.note,
            draws=any(reply.streams is not None for reply in answered),
            batch=None if first_answer.rows is None else BatchRows(local_rows),
            attributes=attributes_in(treespec.children()[-1].context) if is_report else (),
            left_out=first_answer.left_out,
            is_report=is_report,
            has_cache=contains_cache(treespec),
            returned=first_answer.returned,
            varies=first_answer.varies,
        )

    def promises_the_same(self, other: Structure) -> bool:
        """Returns whether results of both look the same to a script that reads no value, attributes aside."""
        (nesting, leaves), (other_nesting, other_leaves) = self._without_attributes(), other._without_attributes()
        # A named tuple that `forward` defines has another class in each result.
        nest_alike = nesting == other_nesting or repr(nesting) == repr(other_nesting)
        return nest_alike and [leaf.promised() for leaf in leaves] == [leaf.promised() for leaf in other_leaves]

    def _without_attributes(self) -> tuple[list[TreeSpec], tuple[LeafTemplate, ...]]:
        """Returns the nesting of the result and of the hooks' arguments, and the leaves of both."""
        if self.treespec.context is not Report:
            return [self.treespec], self.leaves
        result, seen, ended_by, _ = self.treespec.children()
        no_hook_ran = seen.num_leaves == 0 and self.leaves[result.num_leaves].constant is None
        nesting = [result] if no_hook_ran else [result, seen, ended_by]
        return nesting, self.leaves[: sum(spec.num_leaves for spec in nesting)]

    def predictable(self, always_set: Collection[str] = ()) -> bool:
        """Returns whether another call of the same signature must have the same structure.

        That is so if no leaf is a computed number and no attribute is set, since these may depend on anything, and if
        sizes do not depend on values.

        Args:
            always_set: Attributes that each forward sets.
        """
        constants = (leaf.constant for leaf in self.leaves if leaf.kind == "const")
        may_be_set = not set(self.attributes).issubset(always_set)
        return not may_be_set and not self.varies and all(constant is None for constant in constants)


def form_of(replies: Sequence[Any]) -> list[Any] | None:
    """Returns all of the replies but the numbers in them, to be compared: calls of one form have one structure.

    Unlike `Structure.of` it looks at each leaf without a Python call, and of workers of several hosts once at what many
    say. None if the script has to get a warning.
    """
    forms: list[Any] = []
    if isinstance(replies, ItemValues):
        forms.append(replies.numbers())
        replies = replies.templates()
    for reply in replies:
        if reply is None:
            forms.append(None)
        elif type(reply) is not ForwardReply or reply.left_out or reply.warnings or reply.faults:
            return None
        else:
            constants = [leaf.data for leaf in reply.leaves if leaf.kind == "const"]
            leaves = list(map(_what_a_leaf_is, reply.leaves))
            forms.append((_what_a_reply_says(reply), reply.streams is None, leaves, constants))
    return forms


class Signature(NamedTuple):
    """The constant part of a call, under its number on the workers.

    Attributes:
        number: Its number on the workers.
        times_forgotten: The outbox's count when it was defined; workers have the signature while the count stays.
        takes_cache: Whether a key-value cache of transformers is among the arguments.
    """

    number: int
    times_forgotten: int
    takes_cache: bool


class Signatures:
    """The signatures and structures of one model's calls so far.

    Args:
        outbox: The outbox to the workers.
        owner: The model's name on the workers.
        always_set: Attributes that each forward of the model sets.

    Attributes:
        structures: The structures of calls by their keys, see `remote_call.RemoteCall.send`.
        forms: The forms of replies that were found to have these structures, by the same keys.
        numbers: Signatures with plain constants, by their content.
        lists_rows: Whether lists among the arguments travel as rows, by the path of each module that was called. See
            `listed_rows.py`.
        passes_more: Whether some do, or a forward has set attributes so far.
    """

    def __init__(self, outbox: Outbox, owner: str, always_set: frozenset[str] = frozenset()) -> None:
        self._outbox, self._owner, self._always_set = outbox, owner, always_set
        self.structures: dict[Any, Structure] = {}
        self.forms: dict[Any, list[Any]] = {}
        self.numbers: dict[Any, Signature] = {}
        self._unpredictable: set[Any] = set()
        self._attributes: set[str] = set()
        self.lists_rows: dict[str, bool] = {}
        self.passes_more = False
        self._notes: set[str] = set()

    def define(self, path: str, args: Any, kwargs: Any) -> tuple[Signature, list[Tensor]]:
        """Returns the signature of a call, which workers get the first time, and the tensors among its arguments.

        Raises:
            UnsupportedError: An argument is a random number generator, or cannot be pickled.
        """
        leaves, treespec = flatten((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise UnsupportedError(
                "A torch.Generator was passed to a model: workers would draw from copies, and this one stays as it is.",
                allowed="Random numbers of the accelerator's own stream in forward(), or drawn before the call.",
                fix="noise = torch.randn(shape, generator=generator, device='cuda'); model(x, noise)",
            )
        constants = [TensorSlot() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        owner, nesting, values = self._owner, pickle_treespec(treespec), pickle_for_others(constants)
        number = self._outbox.define(
            (owner, path, nesting, values), lambda number: DefineSignature(number, owner, path, nesting, values)
        )
        signature = Signature(number, self._outbox.times_forgotten, contains_cache(treespec))
        return signature, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def learn(self, key: Any, structure: Structure, *, grad: bool) -> None:
        """Records the structure of the calls with `key`; logs once why a training batch is not split."""
        if grad and structure.note and structure.note not in self._notes:
            self._notes.add(structure.note)
            logger.say(structure.note, slow_at=place())
        if not self._attributes.issuperset(structure.attributes):
            self._forget_structures()  # calls that left the attribute as None have to be looked at again
            self._attributes.update(structure.attributes)
            self.passes_more = True
        if structure.predictable(self._always_set) and key not in self._unpredictable:
            if len(self.structures) >= _MAX_STRUCTURES:
                self._forget_structures()
            self.structures[key] = structure
            self.forms.pop(key, None)

    def _forget_structures(self) -> None:
        self.structures.clear()
        self.forms.clear()

    def never_predict(self, key: Any) -> None:
        """Records that a call with `key` had another structure than an earlier call."""
        self.structures.pop(key, None)
        self.forms.pop(key, None)
        self._unpredictable.add(key)
