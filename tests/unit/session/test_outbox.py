"""When commands leave for the workers, and what other workers are told again."""

import pytest
import torch

from moreh_ap.protocol.messages.stream import Synchronize
from moreh_ap.session.outbox import Outbox, Restart
from unit.session.samples import Workers, forward


def test_everything_since_opening_is_told_again_to_other_workers_and_its_promises_are_kept():
    first, second = Workers(fails_at=2), Workers()
    outbox = Outbox(first)
    outbox.on_error = lambda error: Restart(second, lambda command: command)
    outbox.submit(Synchronize())
    outbox.journal.open()
    told = []
    earlier = outbox.submit(forward())
    earlier.add_done_callback(lambda posted: told.append(posted.failed()))
    posted = outbox.submit(Synchronize())
    assert posted.failed()
    assert posted.result() == ["Synchronize"]
    assert second.told == first.told[1:], "what was told before the journal was opened is not told again"
    assert told == [False, False], "a callback hears of the second answer too"
    assert outbox.times_restarted == 1


def test_a_second_failure_is_met_as_well_and_an_error_of_nobodys_business_is_raised():
    meshes = [Workers(fails_at=0), Workers(fails_at=0), Workers()]
    outbox = Outbox(meshes[0])
    outbox.on_error = lambda error: Restart(meshes[1 + outbox.times_restarted], lambda command: command)
    outbox.journal.open()
    assert outbox.submit(Synchronize()).result() == ["Synchronize"]
    assert outbox.times_restarted == 2
    alone = Outbox(Workers(fails_at=0))
    alone.on_error = lambda error: None
    with pytest.raises(torch.OutOfMemoryError):
        alone.submit(Synchronize()).result()
