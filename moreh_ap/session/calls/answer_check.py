"""Compares the workers' answer to a call with what was predicted of it, when the answer arrives.

Decides what a script is told of a forward whose result differs from that of an earlier call of the same key. Runs in
the thread that receives answers, so it never waits.
"""

from __future__ import annotations

from typing import Any

from moreh_ap.errors import ExactnessError
from moreh_ap.protocol.messages.calls import ReadsAttributes
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.signatures import Structure
from moreh_ap.session.outbox import Posted


class ReadsPassedState(Exception):
    """A forward reads attributes that earlier ones have set: it is called once more, and given them.

    Args:
        names: The attributes.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(*names)
        self.names = names


def answered(replies: list[Any]) -> list[Any]:
    """The answers of the workers that have a result, in rank order."""
    return [reply for reply in replies if reply is not None]


def check_structure(model: RemoteModel, key: Any, expected: Structure, reply: Posted) -> None:
    """Runs when a predicted answer arrives: a forward whose shapes depend on values must not pass unnoticed."""
    if reply.failed():
        return
    reads = next((answer for answer in reply.result() if isinstance(answer, ReadsAttributes)), None)
    if reads is not None:
        model.session.workers.fail(
            ExactnessError(
                f"A forward reads {', '.join(reads.names)}, which others set in some calls only.",
                allowed="Attributes that every forward of the same arguments sets.",
                fix=f"self.{reads.names[0].rpartition('.')[2]} = None  # in the calls that do not set it",
            )
        )
        return
    found = Structure.of(reply.result())
    if found.mode != expected.mode:  # rows have begun to take different ways: the next call waits, and the log says so
        model.signatures.never_predict(key)
    if found.attributes:  # set in some calls only: this one did not wait for it, others will
        model.signatures.never_predict(key)
    model.note_left_out((*found.attributes, *answered(reply.result())[0].left_out))
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
    if not found.promises_the_same(expected):
        model.signatures.never_predict(key)
        shapes = [leaf.shape for leaf in expected.leaves], [leaf.shape for leaf in found.leaves]
        model.session.workers.fail(
            ExactnessError(
                f"The shapes of a forward's outputs depend on the values of its inputs: {shapes[0]}, then {shapes[1]}.",
                allowed="Outputs whose shapes follow from the inputs' shapes.",
                fix="return outputs of fixed shape, or move the data-dependent selection after the call",
            )
        )


def learn_structure(model: RemoteModel, key: Any, replies: list[Any], *, grad: bool) -> Structure:
    """Returns the structure that workers answered to a call, for which none was predicted, and remembers it.

    Raises:
        ReadsPassedState: The forward has not run, as it reads attributes that earlier ones have set.
    """
    reads = next((answer for answer in replies if isinstance(answer, ReadsAttributes)), None)
    if reads is not None:
        raise ReadsPassedState(reads.names)
    structure = Structure.of(replies)
    model.signatures.learn(key, structure, grad=grad)
    model.note_left_out(answered(replies)[0].left_out)
    return structure
