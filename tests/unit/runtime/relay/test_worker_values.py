"""What workers of several hosts answered is read where it is asked for: what all say once, however many they are."""

from __future__ import annotations

import sys

import pytest
import torch

from moreh_ap.protocol.encoding import capture_failure, pack
from moreh_ap.protocol.messages.calls import ForwardReply
from moreh_ap.protocol.messages.tensors import LeafReply
from moreh_ap.runtime.outcome_resolver import OutcomeResolver
from moreh_ap.runtime.relay.answers import JoinedAnswers
from moreh_ap.runtime.relay.worker_answer import DONE, FAILED, SKIPPED, Answer
from moreh_ap.runtime.relay.worker_values import Beside, WorkerAnswers, first_answer
from moreh_ap.runtime.relay.written_answers import written_other, written_result
from moreh_ap.session.calls.joined_leaves import joined_leaf
from moreh_ap.session.models.signatures import form_of

PER_HOST, FAN_OUT = 8, 4


def joined(answers, size):
    """Joins answers in groups of so many, in their order; returns how many workers each group is, and its parts."""
    found = []
    for begin in range(0, len(answers), size):
        group = answers[begin : begin + size]
        counts = [count for count, _ in group]
        one = JoinedAnswers(counts)
        for source, (_, parts) in enumerate(group):
            one.take(source, parts)
        found.append((sum(counts), one.parts()))
    return found


def arrived(results, per_host=PER_HOST):
    """Returns what arrives at the controller of what workers answered, and its bytes."""
    found = joined([(1, parts) for parts in results], per_host)
    while len(found) > FAN_OUT:
        found = joined(found, FAN_OUT)
    pending = JoinedAnswers([count for count, _ in found])
    for source, (_, parts) in enumerate(found):
        pending.take(source, parts)
    return pending, sum(len(part) for _, parts in found for part in parts)


def step(rank, rows=8):
    """What a worker answers to the message of a step: a reply with its part of the loss, and where gradients are."""
    data = torch.tensor(float(rank)).numpy().tobytes()
    loss = LeafReply("share", (), torch.float32, True, data, is_operand=True)
    return [None, ForwardReply(b"nesting" * 10, (loss,), "split", "", rows=rows), b"\1" * 150]


def calls_of(work):
    counted = [0]

    def count(frame, event, argument):
        if event == "call" and "moreh_ap" in frame.f_code.co_filename:
            counted[0] += 1

    sys.setprofile(count)
    try:
        found = work()
    finally:
        sys.setprofile(None)
    return counted[0], found


def read(pending):
    """What a session does with the answers of a step, of which the script reads the loss."""
    values = OutcomeResolver().resolve(0, False, WorkerAnswers(pending)).values
    reply, reached = values.item(1), values.item(2)
    return form_of(reply), reached.distinct(), joined_leaf(reply, 0)


def test_a_step_costs_the_controller_as_many_calls_for_512_workers_as_for_128_and_4_bytes_each():
    costs = {}
    for workers in (8, 128, 512):  # of one group of hosts, and of four
        pending, num_bytes = arrived([written_result(step(rank)) for rank in range(workers)])
        calls, (form, reached, loss) = calls_of(lambda pending=pending: read(pending))
        assert form == [b"", *form_of([step(0)[1]])] and reached == [b"\1" * 150]
        assert loss.item() == sum(range(workers))
        costs[workers] = calls, num_bytes
    assert costs[512][0] == costs[128][0] <= costs[8][0] + 20
    assert costs[512][1] - costs[128][1] == 4 * (512 - 128), "the parts of the loss alone"


def test_workers_that_say_something_else_keep_their_places():
    ranks = range(64)
    results = [step(rank, rows=9 if rank < 7 else 8) for rank in ranks]
    pending, num_bytes = arrived(list(map(written_result, results)))
    values = WorkerAnswers(pending).values()
    assert list(values) == results and list(values.item(1)) == [result[1] for result in results]
    assert values[-1] == results[-1] and values[3:5] == results[3:5] and len(values.item(0)) == len(values) == 64
    templates = values.item(1).templates()
    assert [one.rows for one in templates] == [9, 8] and isinstance(templates[0].leaves[0].data, Beside)
    assert joined_leaf(values.item(1), 0) is None, "each worker's reply is looked at"
    assert num_bytes < 64 * 4 + 4 * 1200


def test_forms_differ_where_a_reply_says_something_else_or_another_worker_says_it():
    def form(rows):
        pending, _ = arrived([written_result(step(rank, one)) for rank, one in enumerate(rows)])
        return form_of(WorkerAnswers(pending).values().item(1))

    assert form([8] * 16) == form([8] * 16)
    assert form([8] * 15 + [7]) != form([8] * 16) and form([8] * 15 + [7]) != form([7] + [8] * 15)


def test_a_tensor_that_the_first_worker_alone_sends_and_results_of_the_last_stage():
    first = LeafReply("same", (2,), torch.float32, False, torch.ones(2).numpy().tobytes())
    others = LeafReply("same", (2,), torch.float32, False, None)
    pending, _ = arrived([written_result([[others if rank else first]]) for rank in range(16)])
    item = WorkerAnswers(pending).values().item(0)
    assert joined_leaf(item, 0) is None and LeafReply.join([one[0] for one in item]).tolist() == [1.0, 1.0]
    pending, _ = arrived([written_result([None if rank < 8 else step(rank)[1]]) for rank in range(16)])
    item = WorkerAnswers(pending).values().item(0)
    assert list(item) == [None] * 8 + [step(rank)[1] for rank in range(8, 16)] and joined_leaf(item, 0) is None


@pytest.mark.parametrize("kind", ["rows", "share"])
def test_a_leaf_is_the_tensor_that_is_joined_of_each_worker_s(kind):
    torch.manual_seed(0)
    shards = [torch.randn(3, 5) for _ in range(16)]
    leaves = [LeafReply(kind, (3, 5), torch.float32, False, one.numpy().tobytes(), order=(1, 0)) for one in shards]
    pending, _ = arrived([written_result([[leaf]]) for leaf in leaves])
    full = joined_leaf(WorkerAnswers(pending).values().item(0), 0)
    assert torch.equal(full, LeafReply.join(leaves)) and full.stride() == LeafReply.join(leaves).stride()


@pytest.mark.parametrize("result", [None, [], {"a": b"x" * 100_000}, [b"", [1], torch.ones(20_000)], b"y"])
def test_any_result_arrives(result):
    pending, _ = arrived([written_result(result) for _ in range(3)], per_host=2)
    values = WorkerAnswers(pending).values()
    for found in values or [None]:
        assert str(found) == str(result)


def test_failures_are_told_with_all_answers():
    try:
        raise ValueError("why")
    except ValueError as error:
        failed = Answer(FAILED, pack(capture_failure(error, 1)))
    assert first_answer(written_other(failed)) == failed
    results = [written_result([1, b"2"]), written_other(failed), written_other(Answer(SKIPPED, None))]
    answers = WorkerAnswers(arrived(results, per_host=2)[0])
    assert list(answers) == [Answer(DONE, pack([1, b"2"])), failed, Answer(SKIPPED, None)]
    assert answers.values() is None
    outcome = OutcomeResolver().resolve(0, True, answers)
    assert str(outcome.error) == "why" and outcome.is_new and outcome.must_stop


def test_an_answer_that_cannot_be_built_is_an_error_of_the_command():
    class Unknown:
        def __reduce__(self):
            return __import__, ("no_module_of_this_name",)

    outcome = OutcomeResolver().resolve(0, True, WorkerAnswers(arrived([written_result(Unknown())] * 2)[0]))
    assert isinstance(outcome.error, ModuleNotFoundError) and outcome.is_new and not outcome.must_stop
