"""Compares the workers' reply to a call with the predicted structure when the reply arrives.

Decides which error or log line the script gets if a result has another structure than an earlier call with the same
key. Runs in the thread that receives replies, so it never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moreh_ap.errors import ExactnessError, TrialError, TrialWarning, UnsplitError
from moreh_ap.protocol.messages.calls import (
    FEWER_ROWS,
    NO_ROWS,
    SINGLE_ROW,
    UNSPLIT,
    AddsMembers,
    KeepsLists,
    ReadsAttributes,
)
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.signatures import Structure, form_of
from moreh_ap.session.outbox import Posted


class HasToBeRepeated(Exception):
    """A forward cannot run on the workers as it was sent."""


class ReadsPassedState(HasToBeRepeated):
    """A forward reads attributes that earlier forwards set: the call is repeated with these attributes as arguments.

    Args:
        names: Paths and names of the attributes.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(*names)
        self.names = names


class HasOtherLists(HasToBeRepeated):
    """Lists among the arguments have no entry for each row: the call is repeated with the lists as they are."""


class MakesMembers(HasToBeRepeated):
    """A forward adds layers, buffers or hooks to the model: it was undone, and has to run on the script's own modules.

    Args:
        names: What it adds.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(*names)
        self.names = names


def answered(replies: Sequence[Any]) -> list[Any]:
    """Returns the replies of the workers that have a result, in rank order."""
    return [reply for reply in replies if reply is not None]


def check_structure(model: RemoteModel, key: Any, expected: Structure, reply: Posted) -> None:
    """Checks the reply to a call whose structure was predicted: the shapes may depend on values after all."""
    if reply.failed():
        return
    replies = reply.result()
    form = form_of(replies)
    if form is not None and model.signatures.forms.get(key) == form:
        return
    reads = next((answer for answer in replies if isinstance(answer, ReadsAttributes)), None)
    if reads is not None:
        model.session.workers.fail(
            ExactnessError(
                f"A forward reads {', '.join(reads.names)}, which others set in some calls only.",
                allowed="Attributes that every forward of the same arguments sets.",
                fix=f"self.{reads.names[0].rpartition('.')[2]} = None  # in the calls that do not set it",
            )
        )
        return
    found = Structure.of(replies)
    fault = _note_faults(model, replies)
    if fault is not None:
        model.session.workers.fail(fault)
    if found.mode != expected.mode:  # the rows now take different branches: the next call waits, and the log says so
        model.signatures.never_predict(key)
        if _is_refused(model, found):
            model.session.workers.fail(_unsplit(found))
    answer, others = answered(replies)[0], [name for name in found.attributes if name not in expected.attributes]
    if others:  # set in some calls only: this call did not wait for it, later calls will
        model.signatures.never_predict(key)
    model.untold.note((*others, *answer.left_out), answer.warnings)
    if found.draws and not expected.draws:
        model.signatures.never_predict(key)
        model.session.workers.fail(
            ExactnessError(
                "A forward drew random numbers, and the same call had drawn none before: they are not those of one "
                "device.",
                allowed="A forward that, in one mode and with such arguments, draws always or never.",
                fix="torch.rand(()) in every forward, and a condition on what it gives",
            )
        )
    if not found.promises_the_same(expected) or not set(expected.attributes).issubset(found.attributes):
        model.signatures.never_predict(key)
        shapes = [leaf.shape for leaf in expected.leaves], [leaf.shape for leaf in found.leaves]
        model.session.workers.fail(
            ExactnessError(
                f"The shapes of a forward's outputs depend on the values of its inputs: {shapes[0]}, then {shapes[1]}.",
                allowed="Outputs whose shapes follow from the inputs' shapes.",
                fix="return outputs of fixed shape, or move the data-dependent selection after the call",
            )
        )
    if form is not None and model.signatures.structures.get(key) is expected:
        model.signatures.forms[key] = form


def learn_structure(model: RemoteModel, key: Any, replies: Sequence[Any], *, grad: bool) -> Structure:
    """Waits for the reply to a call without a predicted structure; records the structure and returns it.

    Raises:
        ReadsPassedState: The forward has not run, since it reads attributes that earlier forwards set.
        HasOtherLists: The forward has not run, since its lists have no entry for each row.
        MakesMembers: The forward adds something to the model.
        UnsplitError: Every device computed the whole batch of a training call, which the options refuse.
        TrialError: A trial of the forward failed by our fault, which the options refuse.
    """
    reads = next((answer for answer in replies if isinstance(answer, ReadsAttributes)), None)
    if reads is not None:
        raise ReadsPassedState(reads.names)
    if any(isinstance(answer, KeepsLists) for answer in replies):
        raise HasOtherLists
    adds = next((answer for answer in replies if isinstance(answer, AddsMembers)), None)
    if adds is not None:
        raise MakesMembers(adds.names)
    structure = Structure.of(replies)
    fault = _note_faults(model, replies)
    if fault is not None:
        raise fault
    if grad and _is_refused(model, structure):
        raise _unsplit(structure)
    model.signatures.learn(key, structure, grad=grad)
    answer = answered(replies)[0]
    model.untold.note(answer.left_out, answer.warnings)
    return structure


def _note_faults(model: RemoteModel, replies: Sequence[Any]) -> TrialError | None:
    """Has the script warned of a trial that failed by our fault; returns an error instead if options ask for one."""
    found = next((fault for answer in answered(replies) for fault in answer.faults), None)
    if found is None:
        return None
    fact = f"Trying forward() of {type(model.root).__name__} on a few rows failed by a fault of moreh_ap:\n\n{found}"
    if model.session.options.strict:
        return TrialError(
            fact,
            allowed="With MOREH_STRICT=1 only models whose forward can be tried.",
            fix="MOREH_STRICT=0 python train.py  # right; the batch may not be split",
        )
    see = "The numbers are right; the batch may not be split. Please report it. See: docs/errors.md#trialwarning"
    model.untold.warnings[f"{fact}\n{see}"] = TrialWarning
    return None


def _is_refused(model: RemoteModel, structure: Structure) -> bool:
    is_whole = structure.note.startswith(UNSPLIT) and not structure.note.endswith((FEWER_ROWS, NO_ROWS, SINGLE_ROW))
    return model.session.options.strict and is_whole


def _unsplit(structure: Structure) -> UnsplitError:
    return UnsplitError(
        f"{structure.note}.",
        allowed="With MOREH_STRICT=1 only training calls whose batch is split among the devices.",
        fix="MOREH_STRICT=0 python train.py  # right, and no faster than one device",
    )
