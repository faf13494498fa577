"""Replacement workers under other plans take over the state that the workers have after the first step.

Decides which plan comes next, whether its workers can have the state, and the error for the script if not. Must not
know how copies are put together (`runtime/worker/snapshots`), nor what happens before that step (`oom_recovery.py`).

[Note: after the first step]
From then on only the workers have the state. Where recovery keeps copies of it, workers under the next plan restore
the last copy, get the commands that were sent since, and then the command that failed and all behind it
(`runtime/recovery/recovering_group.py`, [Note: another plan]). Where none are kept, the workers write copies now, if
the command has changed nothing (`session/replay/copy_after_error.py`). The plan may split layers only as the one before
did: what the controller knows of places of tensors stays true. Else the error goes to the script with the reason, and a
record of it lets the next run choose better.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from moreh_ap import log
from moreh_ap.errors import PlanError, WorkerLostError
from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.planner.search import verified_kinds
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.no_fit_error import nothing_fits
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.ranking import Ranking
from moreh_ap.protocol.messages.models import BuildModel
from moreh_ap.runtime.recovery.other_devices import DevicesJoinedError, NoOthersError
from moreh_ap.runtime.recovery.recovering_group import RecoveringWorkerGroup
from moreh_ap.runtime.relay.carrier import Ask
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.outbox import Posted
from moreh_ap.session.planning import oom_records
from moreh_ap.session.planning.machine_profile import Machine, machine_on, machine_with
from moreh_ap.session.planning.plan_selection import Planned, write_selected
from moreh_ap.session.planning.step_watch import Watch
from moreh_ap.session.replay.copy_after_error import CannotCopy, CopyAfterError, CopyOfOne
from moreh_ap.session.replay.restart import Restart
from moreh_ap.session.session import Session
from moreh_ap.states import SessionState


class TakingOver:
    """Starts replacement workers and hands the state over to them. See [Note: after the first step].

    Args:
        session: The session of the workers.

    Attributes:
        planned: The present plan of each model, with what is predicted of it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.planned: weakref.WeakKeyDictionary[RemoteModel, Planned] = weakref.WeakKeyDictionary()
        self._of_one: CopyOfOne | None = None

    def before_end(self, error: BaseException, ask: Ask) -> None:
        """Has the worker that has run out of memory alone copy what it holds, before all workers are ended.

        Nothing is copied where others would not need it: before the first step, where recovery keeps copies, and where
        no plan can follow. Called in the thread that receives answers.
        """
        session = self._session
        workers, replays = session.workers, session.outbox.state.current is SessionState.REPLAYABLE
        if replays or session.trial_plan is not None or not oom_records.is_out_of_memory(error):
            return
        needs_copy = workers.shares_memory and workers.why_bound(error) and session.options.recovery != "memory"
        if needs_copy and not any(planned.is_given for planned in self._models().values()):
            if self._of_one is not None:  # no plan could follow that time
                self._of_one.memory.close()
            self._of_one = CopyOfOne(error, workers.num_workers, ask)

    def under_leaner_plan(self, error: Exception, largest: Planned) -> Restart:
        """Has others take over under the next plan. See [Note: after the first step].

        Raises:
            Exception: That is not possible; of the type of `error`.
        """
        models = self._models()
        remote = max(models, key=lambda one: needed_bytes(models[one]), default=None)
        failed = largest if remote is None else models[remote]
        oom_records.remember(failed.expected, error)
        before = failed.plan
        try:
            if remote is None:
                raise _too_late(failed, "the model has left the workers")
            planned = next_best(failed, failed.chosen, functools.partial(self._is_possible, before))
            copied = self._copied(error, failed)
        except PlanError as nothing:
            raise type(error)(f"{oom_records.first_line(error)}\n{nothing}") from error
        self.planned[remote] = planned
        remote.laid_out_again(planned.plan)
        change, num_devices = under({remote.owner: remote}), planned.plan.num_devices
        reason = f'plan="{before}" ran out of memory: {oom_records.first_line(error)} {log.next_plan(planned.plan)}'
        session, again = self._session, []
        if copied is not None:
            say = functools.partial(_say_how_long, reason, time.monotonic())
            again = copied.messages(change, lambda: Posted(session.outbox), say)
        if copied is None or copied.is_logged:
            workers = self._others(error, change, num_devices, reason)
        else:
            workers = session.restart_workers(num_devices)
        self._tell_of(remote, planned)
        return Restart(workers, change, error, again)

    def on_fewer_devices(self, lost: NoOthersError) -> Restart:
        """Has fewer workers take over, each model under the best plan for them, after as many cannot be started.

        Raises:
            WorkerLostError: That is not possible.
        """
        session, models = self._session, self._models()
        try:
            workers = session.workers
            is_known = workers.shares_memory or lost.hosts
            why_bound = workers.why_bound(lost) if is_known else "which host cannot start workers is not known"
            if why_bound:
                raise PlanError(why_bound)
            fewer = self._on_fewer(models, lost)
        except PlanError as nothing:
            fact = f"{lost.fact}\nThe run cannot go on with fewer devices: {nothing.fact}."
            raise WorkerLostError(fact, nothing.allowed or lost.allowed, nothing.fix or lost.fix) from lost
        for remote, planned in fewer.items():
            self.planned[remote] = planned
            remote.laid_out_again(planned.plan)
        largest = max(fewer, key=lambda one: needed_bytes(fewer[one]))
        num_devices, change = fewer[largest].plan.num_devices, under({remote.owner: remote for remote in fewer})
        reason = f"{lost.fact.partition(chr(10))[0]} {log.next_plan(fewer[largest].plan)}"
        workers = self._others(lost, change, num_devices, reason)
        session.outbox.state.enter(SessionState.UNREPLAYABLE)
        self._tell_of(largest, fewer[largest])
        return Restart(workers, change, lost)

    def on_more_devices(self, joined: DevicesJoinedError) -> Restart:
        """Has workers on more devices take over, each model under the best plan for them; on those of before if there
        is none."""
        session, models = self._session, self._models()
        before, num_before = list(session.hosts), session.num_devices
        more = self._on_more(models, joined)
        for remote, planned in more.items():
            self.planned[remote] = planned
            remote.laid_out_again(planned.plan)
        change, reason = under({remote.owner: remote for remote in more}), joined.fact
        num_devices = num_before
        if more:
            largest = max(more, key=lambda one: needed_bytes(more[one]))
            num_devices = more[largest].plan.num_devices
            reason += f" {log.next_plan(more[largest].plan)}"
        past = cast(RecoveringWorkerGroup, session.workers).end_for_others(joined, change, num_devices, reason)
        if not more:
            if session.pool is not None:
                session.pool.refuse(before)
            past = past._replace(reason=f"{joined.fact} No plan is for them: they are not used")
        session.max_devices = max(session.max_devices, num_devices)
        workers = session.restart_workers(num_devices, past)
        session.outbox.state.enter(SessionState.UNREPLAYABLE)
        if more:
            self._tell_of(largest, more[largest])
        return Restart(workers, change, joined)

    def _on_more(self, models: Mapping[RemoteModel, Planned], joined: DevicesJoinedError) -> dict[RemoteModel, Planned]:
        """Returns the plans of all models on as many devices as each has one for; none: on no more than there were."""
        if not self._session.knows_devices or any(planned.is_given for planned in models.values()):
            return {}
        session, hosts = self._session, joined.hosts
        for count in range(joined.num_workers, session.num_devices, -max(1, len(hosts))):
            found: dict[RemoteModel, Planned] = {}
            for remote, planned in models.items():
                known_as = planned.expected.machine
                machine = machine_with(session, count, joined, known_as) if hosts else machine_on(session, count)
                if machine is not None:
                    found |= self._best_on(machine, remote, planned)
            if len(found) == len(models):
                return found
        return {}

    def _best_on(self, machine: Machine, remote: RemoteModel, planned: Planned) -> dict[RemoteModel, Planned]:
        """Returns a model with its best plan on a machine that can follow its present one; nothing if there is none."""
        task = replace(planned.task, cluster=machine.cluster)
        best = _first_possible(search(task), planned.family, functools.partial(self._is_possible, planned.plan))
        if best is None:
            return {}
        there = replace(planned, task=task, expected=replace(planned.expected, machine=machine.key))
        return {remote: there.instead(best)}

    def _on_fewer(self, models: Mapping[RemoteModel, Planned], lost: NoOthersError) -> dict[RemoteModel, Planned]:
        """Returns the plans of all models on the largest smaller number of devices on which each has one.

        Raises:
            PlanError: There is none, or the script gave the plan.
        """
        given = next((planned.plan for planned in models.values() if planned.is_given), None)
        if given is not None or not models:
            raise PlanError(f"plan={str(given)!r} is what the script asks for" if models else "no model is on them")
        most = self._session.num_devices - 1 if lost.num_workers is None else lost.num_workers
        for count in range(most, 0, -max(1, len(lost.hosts))):
            machine = machine_on(self._session, count, lost.hosts)
            if machine is None:
                continue
            found: dict[RemoteModel, Planned] = {}
            for remote, planned in models.items():
                found |= self._best_on(machine, remote, planned)
            if len(found) == len(models):
                return found
        raise PlanError("no plan fits on them")

    def _others(self, error: Exception, change: Callable[[Any], Any], num_devices: int, reason: str) -> WorkerGroup:
        """Starts workers that first get the commands that were sent before an error; returns them, not yet ready."""
        workers = cast(RecoveringWorkerGroup, self._session.workers)  # only these keep commands
        past = workers.end_for_others(error, change, num_devices, reason)
        return self._session.restart_workers(num_devices, past)

    def _models(self) -> dict[RemoteModel, Planned]:
        """Returns the models on the workers."""
        items = list(self.planned.items())
        return {remote: planned for remote, planned in items if not (remote.is_released() or remote.has_left())}

    def _is_possible(self, before: Plan, plan: Plan) -> bool:
        """Returns whether a plan can follow another. See [Note: after the first step]."""
        splits_alike = (plan.tensor, plan.pipeline) in {(1, 1), (before.tensor, before.pipeline)}
        return splits_alike and (not self._session.has_differentiated or plan == plan.whole_model())

    def _copied(self, error: Exception, failed: Planned) -> CopyAfterError | None:
        """Returns a copy that the workers have written now; None where recovery has kept copy and commands.

        Raises:
            PlanError: There is neither.
        """
        session = self._session
        why_bound = session.workers.why_bound(error)
        if not why_bound:
            return None
        workers, of_one = session.workers, self._of_one
        self._of_one = None
        if session.options.recovery == "memory" or not (workers.shares_memory or workers.keeps_commands):
            raise _too_late(failed, why_bound)
        if workers.shares_memory:  # replacement workers get the copy, and not the commands before it
            session.forget_commands("a plan ran out of memory")
        try:
            return CopyAfterError(session.workers, error, session.outbox.unanswered, of_one)
        except CannotCopy as reason:
            raise _too_late(failed, f"{reason}, and {why_bound}", has_ended=session.workers.is_stopped()) from reason

    def _tell_of(self, remote: RemoteModel, planned: Planned) -> None:
        """Writes a model's new plan into its file and the job's record, and watches its steps anew."""
        write_selected(planned.plan, planned.task)
        self._session.job.has_model(type(remote.root).__name__, str(planned.plan))
        self._session.watch = Watch(self._session.outbox, planned.expected, lambda *_: self._session.stop_watching())


def under(models: Mapping[str, RemoteModel]) -> Callable[[Any], Any]:
    """Returns the change to each command that is sent again: models are built under their present plans."""

    def change(command: Any) -> Any:
        if not isinstance(command, BuildModel) or command.owner not in models:
            return command
        remote = models[command.owner]
        example = remote.example() or (command.example if remote.plan.pipeline > 1 else None)
        return replace(command, plan=str(remote.plan), example=example)

    return change


def next_best(planned: Planned, failed: Candidate, is_possible: Callable[[Plan], bool]) -> Planned:
    """Returns the fastest plan that needs less memory than the one that ran out.

    Args:
        planned: The model, on the devices on which the plan is looked for.
        failed: The plan that ran out.
        is_possible: Whether commands that will be sent again suit a plan.

    Raises:
        PlanError: No such plan is left, or the script gave the plan.
    """
    if planned.is_given:
        raise PlanError(
            f"plan={str(failed.plan)!r}, which the script asks for, ran out of memory",
            "a smaller batch, or a plan of the planner's choice",
            "torch.moreh.option.enable_advanced_parallelization()",
        )
    task = planned.task.with_usable(oom_records.limit_after(failed))
    ranking = search(task)
    best = _first_possible(ranking, planned.family, is_possible)
    if best is not None:
        return planned.instead(best)
    needed, usable = failed.memory.reserved_bytes, planned.task.usable_bytes
    there_are = f"{usable / 2**30:.2f} GiB are available"
    remedy = nothing_fits(task, ranking.candidates)
    raise PlanError(
        f"plan={str(failed.plan)!r} ran out of memory, and no plan needs clearly less: "
        f"{needed / 2**30:.2f} GiB on a device were predicted, {there_are}",
        remedy.allowed,
        remedy.fix,
    )


def _first_possible(ranking: Ranking, family: str, is_possible: Callable[[Plan], bool]) -> Candidate | None:
    """Returns the best plan that fits, is verified for a family of models, and is possible."""
    for candidate in ranking.candidates[: ranking.num_fitting]:
        plan = candidate.plan
        is_verified = not verified_kinds.kinds_to_verify(plan) or verified_kinds.is_verified(family, plan)
        if is_verified and is_possible(plan):
            return candidate
    return None


def _too_late(planned: Planned, why: str, *, has_ended: bool = False) -> PlanError:
    """Returns the error where no plan can follow; `has_ended`: where the workers have ended with what they held."""
    fact = f"plan={str(planned.plan)!r} ran out of memory after the first step, and no other plan can take over: {why}"
    less = f"a smaller batch; or a second run, which chooses a plan that needs less because of {oom_records.FILE.path}"
    if has_ended:
        again = 'enable_advanced_parallelization(recovery="memory")  # and load a checkpoint into a model built anew'
        return PlanError(fact, f"copies from the beginning; {less}", f"torch.moreh.option.{again}")
    load = "extra = moreh_ap.load(folder, model=model, optimizer=optimizer)  # a checkpoint loads under any plan"
    return PlanError(fact, less, load)


def _say_how_long(reason: str, since_s: float) -> None:
    logger.say(f"{reason}: 0 steps were computed again, {time.monotonic() - since_s:.1f} s", logger.NOTICE)


def needed_bytes(planned: Planned) -> float:
    """Returns the bytes on a device that are predicted for a model under its plan."""
    return planned.chosen.memory.reserved_bytes
