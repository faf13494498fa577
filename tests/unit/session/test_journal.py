"""What a journal keeps, and when it closes."""

import torch

from moreh_ap.protocol.messages.calls import Differentiate
from moreh_ap.protocol.messages.state import RunOperation
from moreh_ap.protocol.messages.tensors import OutputRef, StateRef, TensorData
from moreh_ap.session import journal
from moreh_ap.states import SessionState, StateMachine
from unit.session.samples import forward


def test_a_journal_closes_when_it_grows_too_large(monkeypatch):
    monkeypatch.setattr(journal, "_MOST_BYTES", 100)
    noted, closed = journal.Journal(StateMachine(SessionState.EMPTY)), []
    noted.open()
    noted.state.when_left(SessionState.REPLAYABLE, lambda: closed.append(True))
    noted.note((forward(TensorData.of(torch.zeros(20))),), ())
    assert noted.state.current is SessionState.REPLAYABLE and not closed
    noted.note((forward(TensorData.of(torch.zeros(20))),), ())
    assert noted.state.current is SessionState.UNREPLAYABLE and closed == [True] and noted.messages() == ()


def test_a_journal_knows_what_another_layout_would_break():
    noted = journal.Journal(StateMachine(SessionState.EMPTY))
    noted.open()
    noted.note((forward(TensorData.of(torch.zeros(2))),), ())
    assert not noted.is_bound_to_layout
    noted.note((forward(OutputRef(0, 0)),), ())
    assert noted.is_bound_to_layout and noted.passes_outputs_on
    noted.open()
    noted.note((RunOperation("aten::add.Tensor", (), {}, ()),), ())
    assert noted.is_bound_to_layout and not noted.differentiates_gradients and not noted.passes_outputs_on
    noted.note((Differentiate(1, 0, (), (), (), ()),), ())
    assert noted.differentiates_gradients


def test_state_refs_are_not_counted_as_bytes():
    noted = journal.Journal(StateMachine(SessionState.EMPTY))
    noted.open()
    noted.note((forward(StateRef("model0", "param", "weight")),), ())
    assert noted.state.current is SessionState.REPLAYABLE
