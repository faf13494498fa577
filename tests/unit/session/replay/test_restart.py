"""Which messages are sent to others, and which are of no use any more."""

from __future__ import annotations

from moreh_ap.errors import WorkerLostError
from moreh_ap.runtime.future import Reply
from moreh_ap.session.replay.restart import Unanswered


class Group:
    """Workers of which some memory is given back."""

    def __init__(self) -> None:
        self.let_go_of: list[object] = []

    def let_go(self, reply: object) -> None:
        self.let_go_of.append(reply)


GROUP = Group()


def sent(messages: Unanswered, name: str, error: BaseException | None = None) -> Reply:
    reply = Reply()
    reply.group = GROUP
    messages[id(reply)] = [name], [], reply
    if error is not None:
        reply.set_exception(error)
        messages.has_failed = True
    return reply


def test_what_ended_in_the_error_and_what_had_no_answer_is_sent_again_in_order():
    messages, error = Unanswered(), MemoryError("none")
    sent(messages, "raised before", ValueError("a batch"))
    sent(messages, "failed", error)
    sent(messages, "skipped", error)
    sent(messages, "ended with its workers", WorkerLostError("closed"))
    sent(messages, "without an answer")
    names = [commands for commands, _, _ in messages.ended_in(error)]
    assert names == [["failed"], ["skipped"], ["ended with its workers"], ["without an answer"]]


def test_an_answer_says_that_the_errors_before_it_were_raised():
    messages, error = Unanswered(), MemoryError("none")
    raised = sent(messages, "failed", ValueError("a batch"))
    waiting = sent(messages, "without an answer")
    answered = sent(messages, "answered")
    sent(messages, "failed later", error)
    messages.forget_before(answered)
    assert [commands for commands, _, _ in messages.values()] == [
        ["without an answer"],
        ["answered"],
        ["failed later"],
    ]
    assert messages.has_failed and not waiting.done()
    assert GROUP.let_go_of == [raised], "its values are not needed any more"
