"""Which plan follows one that ran out of memory on fewer devices than there are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import UNCORRECTED
from moreh_ap.session.planning.oom_recovery import Recovery
from moreh_ap.session.planning.plan_selection import Planned
from moreh_ap.session.planning.step_watch import Expected
from moreh_ap.states import SessionState
from unit.planner.search.test_device_counts import on, task

# On one device a single plan is left.
LEFT = Constraints(kinds=frozenset(), offload=False, activation_recomputation=False, num_micro_batches=1)
WHOLE = task("8xT4", batch=8, constraints=LEFT)


def planned(one, on_all=None):
    best = search(one).best
    return Planned(Expected("here", "small", 8, best, UNCORRECTED), one, (best,), "", False, on_all)


def recovery(layout, state=SessionState.REPLAYABLE, **journal):
    known = {"is_bound_to_layout": False, "passes_outputs_on": False, "differentiates_gradients": False, **journal}
    outbox = SimpleNamespace(journal=SimpleNamespace(state=SimpleNamespace(current=state), **known))
    found = Recovery(SimpleNamespace(outbox=outbox))
    found._models = [SimpleNamespace(first_layout=SimpleNamespace(planned=layout))]
    return found


def test_plans_of_the_present_devices_come_first():
    whole = task("8xT4", batch=8)
    layout = planned(on(whole, 2), planned(whole))
    following, is_on_all = recovery(layout)._next_plan(layout)
    assert not is_on_all and following.plan.num_devices == 2


def test_where_none_is_left_there_all_devices_are_used():
    layout = planned(on(WHOLE, 1), planned(WHOLE))
    following, is_on_all = recovery(layout)._next_plan(layout)
    assert is_on_all and following.plan.num_devices == 8


@pytest.mark.parametrize(
    "why",
    [
        {"state": SessionState.UNREPLAYABLE},
        {"passes_outputs_on": True},
        {"on_all": None},
    ],
)
def test_the_error_stays_where_other_workers_cannot_take_over(why):
    layout = planned(on(WHOLE, 1), why.pop("on_all", planned(WHOLE)))
    with pytest.raises(PlanError, match="no plan needs clearly less"):
        recovery(layout, **why)._next_plan(layout)
