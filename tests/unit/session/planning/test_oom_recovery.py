"""Which plan follows one that ran out of memory on fewer devices than there are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from moreh_ap.errors import PlanError, WorkerLostError
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import UNCORRECTED
from moreh_ap.protocol.messages.models import BuildModel
from moreh_ap.runtime.recovery.other_devices import DevicesJoinedError, Joined, NoOthersError
from moreh_ap.session.planning.oom_recovery import Recovery
from moreh_ap.session.planning.plan_selection import Planned
from moreh_ap.session.planning.step_watch import Expected
from moreh_ap.session.replay import taking_over
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


class Machine:
    """So many devices of the sort that the task is for."""

    def __init__(self, count):
        self.cluster, self.key = on(task("8xT4", batch=8), count).cluster, f"with {count}"


class Remote:
    """A model on workers."""

    owner, root = "model0", object()

    def __init__(self, plan):
        self.plan = plan

    def is_released(self):
        return False

    has_left = is_released

    def laid_out_again(self, plan):
        self.plan = plan

    def example(self):
        return None


class Group:
    """Workers, of which `bound` says why others cannot take over."""

    shares_memory, has_stopped, keeps_commands = True, False, False

    def is_stopped(self):
        return self.has_stopped

    def __init__(self, bound=""):
        self.bound = bound

    def why_bound(self, error):
        return self.bound

    def end_for_others(self, error, change, num_workers, reason):
        self.ended = error, change(BuildModel("model0", b"", "replicate=8", {})).plan, num_workers, reason
        return "past"


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Returns the recovery of a model that has been trained for a step, and its session."""
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    monkeypatch.setattr(taking_over, "write_selected", lambda *what: None)
    monkeypatch.setattr(taking_over, "Watch", lambda *what: None)

    def make(bound="", has_differentiated=False):
        layout = planned(task("8xT4", batch=8))
        made = recovery(layout, SessionState.UNREPLAYABLE)
        session = made._session
        session.workers, session.has_differentiated, session.trial_plan = Group(bound), has_differentiated, None
        session.job = SimpleNamespace(has_model=lambda *what: None)
        session.pool = None
        session.restart_workers = lambda count, past: (count, past)
        remote, made._models = Remote(layout.plan), []
        made._taking_over.planned[remote], made._largest = layout, layout
        session.options = SimpleNamespace(recovery="memory")
        return made, session, remote

    return make


def test_after_the_first_step_others_go_on_under_a_plan_that_splits_layers_alike(trained):
    made, session, remote = trained()
    before, error = remote.plan, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    restart = made._on_error(error)
    assert restart.workers == (remote.plan.num_devices, "past") and restart.error is error
    assert remote.plan != before and (remote.plan.tensor, remote.plan.pipeline) in {
        (1, 1),
        (before.tensor, before.pipeline),
    }
    ended, built, count, reason = session.workers.ended
    assert ended is error and built == str(remote.plan) and count == remote.plan.num_devices
    assert reason == (
        f'plan="{before}" ran out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. '
        f'Others took over with plan="{remote.plan}"'
    )
    leaner = remote.plan
    made._on_error(error)
    assert remote.plan not in (before, leaner), "the next one after that"


def test_where_others_cannot_take_over_the_script_gets_the_error_with_the_reason(trained):
    made, session, _ = trained(bound="there is no copy")
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError, match="no other plan can take over: there is no copy") as raised:
        made._on_error(error)
    assert raised.value.__cause__ is error and not hasattr(session.workers, "ended")


@pytest.mark.parametrize("recovery", ["memory", "auto", "off"])
def test_workers_of_several_hosts_write_no_copy_after_an_error(trained, recovery):
    made, session, _ = trained(bound="there is no copy")
    session.options, session.workers.shares_memory = SimpleNamespace(recovery=recovery), False
    with pytest.raises(torch.OutOfMemoryError, match="can take over: there is no copy"):
        made._on_error(torch.OutOfMemoryError("CUDA out of memory."))


def test_workers_of_several_hosts_that_keep_commands_write_a_copy_after_an_error(trained, monkeypatch):
    made, session, remote = trained(bound="no copy of what workers hold has been taken yet")
    session.options, session.workers.shares_memory = SimpleNamespace(recovery="auto"), False
    session.workers.keeps_commands, session.outbox.unanswered = True, "messages"
    asked, again = [], [(["the command that failed"], ["a promise"])]
    copied = SimpleNamespace(is_logged=True, messages=lambda change, promise, restored: again)
    monkeypatch.setattr(taking_over, "CopyAfterError", lambda *of: asked.append(of) or copied)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    restart = made._on_error(error)
    assert asked == [(session.workers, error, "messages", None)]
    assert restart.workers == (remote.plan.num_devices, "past") and restart.again == again
    assert session.workers.ended[0] is error, "others get the log, which has the copy"


def test_agents_that_no_others_take_over_end_with_the_workers(trained):
    made, session, _ = trained(bound="there is no copy")
    session.workers.shares_memory, session.options, ended = False, SimpleNamespace(recovery="auto"), []
    session.pool = SimpleNamespace(end_given_back=lambda: ended.append("agents"))
    session.workers.close = lambda: ended.append("workers")
    with pytest.raises(torch.OutOfMemoryError):
        made._on_error(torch.OutOfMemoryError("CUDA out of memory."))
    assert ended == [], "the workers go on: all have run out, and nothing is lost"
    session.workers.has_stopped = True
    with pytest.raises(torch.OutOfMemoryError):
        made._on_error(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(WorkerLostError, match="with fewer devices: which host cannot start workers is not known"):
        made._on_error(lost())
    assert made._on_error(ValueError("of the script")) is None
    assert ended == ["workers", "agents"] * 3


def test_no_other_plan_takes_over_where_gradients_were_differentiated(trained):
    made, _, _ = trained(has_differentiated=True)
    with pytest.raises(torch.OutOfMemoryError, match="no plan needs clearly less"):
        made._on_error(torch.OutOfMemoryError("CUDA out of memory."))


def lost():
    return NoOthersError("Worker 7 of 8 died. No others can be started: its device is gone.")


def test_where_a_device_is_gone_the_best_plan_for_fewer_takes_over(trained, monkeypatch):
    made, session, remote = trained()
    monkeypatch.setattr(taking_over, "machine_on", lambda session, count, hosts=(): Machine(count))
    session.num_devices, before, error = 8, remote.plan, lost()
    session.outbox.state = SimpleNamespace(enter=lambda state: entered.append(state))
    entered = []
    restart = made._on_error(error)
    count = remote.plan.num_devices
    assert 1 <= count < 8 and restart.workers == (count, "past") and restart.error is error
    assert (remote.plan.tensor, remote.plan.pipeline) in {(1, 1), (before.tensor, before.pipeline)}
    ended, built, num_workers, reason = session.workers.ended
    assert (ended, built, num_workers) == (error, str(remote.plan), count) and entered == [SessionState.UNREPLAYABLE]
    assert reason == f'{error.fact} Others took over with plan="{remote.plan}"'
    assert made._taking_over.planned[remote].task.cluster.num_devices == count


def test_where_hosts_that_are_left_have_no_room_as_many_as_they_share_evenly_take_over(trained, monkeypatch):
    made, session, _ = trained()
    asked = []

    def machine_on(session, count, hosts):
        asked.append((count, hosts))
        return Machine(count) if count == 4 else None

    monkeypatch.setattr(taking_over, "machine_on", machine_on)
    session.num_devices, session.workers.shares_memory = 8, False
    session.outbox.state = SimpleNamespace(enter=lambda state: None)
    error = NoOthersError.on_hosts("8 workers cannot be dealt evenly to 2 hosts.", 6, ("a", "b"))
    assert made._on_error(error).workers == (4, "past") and asked == [(6, ("a", "b")), (4, ("a", "b"))]


@pytest.fixture
def on_a_host(trained, monkeypatch):
    """The same on one of two hosts with four devices each."""
    made, session, remote = trained()
    layout = planned(on(task("8xT4", batch=8), 4))
    made._taking_over.planned[remote], remote.plan = layout, layout.plan
    monkeypatch.setattr(taking_over, "machine_with", lambda session, count, hosts, key: Machine(count))
    session.num_devices = session.max_devices = 4
    session.hosts, session.knows_devices = ["a"], True
    session.pool = SimpleNamespace(refuse=lambda hosts: refused.append(hosts), refused=(refused := []))
    session.outbox.state = SimpleNamespace(enter=lambda state: None)
    return made, session, remote


JOINED = DevicesJoinedError(Joined("b joined a: 8 workers on 2 hosts, 4 on 1 before.", 8, ("a", "b")))


def test_where_a_host_has_joined_the_best_plan_for_all_devices_takes_over(on_a_host):
    made, session, remote = on_a_host
    before = remote.plan
    restart = made._on_error(JOINED)
    assert remote.plan.num_devices == 8 and restart.workers == (8, "past") and restart.error is JOINED
    assert (remote.plan.tensor, remote.plan.pipeline) in {(1, 1), (before.tensor, before.pipeline)}
    ended, built, num_workers, reason = session.workers.ended
    assert (ended, built, num_workers) == (JOINED, str(remote.plan), 8)
    assert reason == f'{JOINED.fact} Others took over with plan="{remote.plan}"'
    assert session.max_devices == 8 and session.pool.refused == []
    now = made._taking_over.planned[remote]
    assert now.task.cluster.num_devices == 8 and now.expected.machine == "with 8"


@pytest.mark.parametrize("why", ["the script gave the plan", "the machine is not known"])
def test_hosts_that_joined_and_have_no_plan_are_not_used(on_a_host, monkeypatch, why):
    made, session, remote = on_a_host
    before, layout = remote.plan, made._taking_over.planned[remote]
    if why == "the script gave the plan":
        made._taking_over.planned[remote] = replace(layout, is_given=True)
    else:
        monkeypatch.setattr(taking_over, "machine_with", lambda *what: None)
    session.workers = Group()
    session.workers.end_for_others = lambda error, change, count, reason: ended.append((count, reason)) or Known("")
    ended = []
    restart = made._on_error(JOINED)
    assert remote.plan == before and ended == [(4, JOINED.fact)] and session.pool.refused == [["a"]]
    assert restart.workers == (4, Known(f"{JOINED.fact} No plan is for them: they are not used"))


def test_where_devices_of_one_machine_are_there_again_the_best_plan_for_all_takes_over(on_a_host, monkeypatch):
    made, session, remote = on_a_host
    monkeypatch.setattr(taking_over, "machine_on", lambda session, count, hosts=(): Machine(count))
    monkeypatch.setattr(taking_over, "machine_with", lambda *what: pytest.fail("there are no hosts"))
    session.hosts, session.pool = (), None
    joined = DevicesJoinedError(Joined("8 workers again.", 8, ()))
    restart = made._on_error(joined)
    assert remote.plan.num_devices == 8 and restart.workers == (8, "past")
    assert session.workers.ended[3] == f'8 workers again. Others took over with plan="{remote.plan}"'


class Known(NamedTuple):
    """Stands for what others are told."""

    reason: str


def test_a_lost_device_ends_the_run_where_fewer_cannot_take_over(trained):
    made, _, _ = trained(bound="there is no copy")
    with pytest.raises(WorkerLostError, match=r"cannot go on with fewer devices: there is no copy") as raised:
        made._on_error(lost())
    assert type(raised.value) is WorkerLostError
    made, _, remote = trained()
    layout = made._taking_over.planned[remote]
    made._taking_over.planned[remote] = replace(layout, is_given=True)
    with pytest.raises(WorkerLostError, match="is what the script asks for"):
        made._on_error(lost())
