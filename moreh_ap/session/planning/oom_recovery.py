"""Replaces the plan of a model before its first step is complete, if the chosen plan does not work.

Workers ran out of memory, or the script differentiates gradients, which most plans do not allow.

Decides which plan comes next, and the error for the script if no plan is left. Must not know how commands are kept or
sent again (`journal`, `outbox`).

[Note: replay under another plan]
Until the first optimizer step is complete, everything that the workers have of a model came from the controller or from
files: its values, the calls, operations on gradients. All of it is in the journal. When a worker runs out of memory,
its peers may wait for it in a collective for ever, so all workers are restarted (in the other case the same ones
continue). The journal is replayed, with another plan in the message that builds the model. The workers under that plan
fulfil the script's promises, and since every plan gives the same numbers, the script notices nothing but the time.
After that only the workers have the state: `session/replay/taking_over.py` knows how others get it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from moreh_ap import log
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.values import Value
from moreh_ap.errors import PlanError
from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.runtime.recovery.other_devices import DevicesJoinedError, NoOthersError
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.planning import device_count, oom_records
from moreh_ap.session.planning.plan_selection import Planned, write_selected
from moreh_ap.session.planning.step_watch import Watch
from moreh_ap.session.replay.restart import Restart
from moreh_ap.session.replay.taking_over import TakingOver, needed_bytes, next_best, under
from moreh_ap.session.session import Session
from moreh_ap.states import SessionState

Values = list[tuple[VirtualTensor, Value]]


@dataclass
class _FirstLayout:
    """Of a model before its first step: its present plan, and its values before they went to the workers."""

    planned: Planned
    values: Values


class Recovery:
    """Rebuilds models under the next best plan when they run out of memory. See [Note: replay under another plan].

    Args:
        session: The session of the workers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # Weak: a model goes with its module, and its first layout with it.
        self._models: weakref.WeakSet[RemoteModel] = weakref.WeakSet()
        self._largest: Planned | None = None
        self._taking_over = TakingOver(session)
        session.outbox.on_error = self._on_error
        session.before_end = self._taking_over.before_end
        session.lay_out_again = self.lay_out_again
        session.use_all_devices = self.use_all_devices

    def take_on(self, remote: RemoteModel, planned: Planned, values: Values) -> None:
        """Records that a model was built; `values` are its tensors' values from before.

        Nothing is recorded unless the journal is open; the model cannot be recovered then.
        """
        self._largest = max(filter(None, (self._largest, planned)), key=needed_bytes)
        self._taking_over.planned[remote] = planned
        state = self._session.outbox.state
        if state.current is SessionState.REPLAYABLE:
            if not self._models:
                state.when_left(SessionState.REPLAYABLE, self._forget)
            remote.first_layout = _FirstLayout(planned, values)
            self._models.add(remote)

    def _forget(self) -> None:
        for remote in self._models:
            remote.first_layout = None
        self._models.clear()

    def _on_error(self, error: Exception) -> Restart | None:
        restart = None
        try:
            restart = self._restart_after(error)
        finally:
            pool, workers = self._session.pool, self._session.workers
            if restart is None and workers.is_stopped():
                self._session.has_ended = True
                if pool is not None:
                    workers.close()
                    pool.end_given_back()
        return restart

    def _restart_after(self, error: Exception) -> Restart | None:
        journal = self._session.outbox.journal
        if isinstance(error, DevicesJoinedError):
            return self._taking_over.on_more_devices(error)
        if isinstance(error, NoOthersError) and self._session.trial_plan is None:
            return self._taking_over.on_fewer_devices(error)
        if not oom_records.is_out_of_memory(error) or self._session.trial_plan is not None or self._largest is None:
            return None
        if not (self._models and journal.state.current is SessionState.REPLAYABLE):
            return self._taking_over.under_leaner_plan(error, self._largest)
        # It is unknown which of several models took too much: the largest gets another plan.
        model = max((remote.first_layout for remote in self._models), key=lambda one: needed_bytes(one.planned))
        failed = model.planned.expected
        oom_records.remember(failed, error)
        ran_out = f'plan="{failed.chosen.plan}" ran out of memory'
        try:
            planned, is_on_all = self._next_plan(model.planned)
        except PlanError as nothing:
            self._give_up()
            # The type of the original error, so that a script that tries smaller batches catches it.
            raise type(error)(f"{oom_records.first_line(error)}\n{nothing}") from error
        logger.say(f"{ran_out}: {oom_records.first_line(error)}")
        if is_on_all:
            self._move_all_models(ran_out)
        model.planned = planned
        logger.say(log.plan_line(planned.plan, f"the next that fits: {log.prediction(planned.chosen)}"), logger.NOTICE)
        return self._restart(self._session.restart_workers(planned.plan.num_devices), planned)

    def _next_plan(self, planned: Planned) -> tuple[Planned, bool]:
        """Returns the plan after one that ran out, and whether it is on all devices instead of on the present ones.

        If none there needs clearly less either, it is the one that the model would have had without fewer devices.

        Raises:
            PlanError: No plan is left, or the script gave the plan.
        """
        journal = self._session.outbox.journal

        def is_possible(plan: Plan) -> bool:
            shares_rows_only = plan.tensor * plan.pipeline == 1
            if journal.is_bound_to_layout and not shares_rows_only:
                return False
            return not journal.differentiates_gradients or plan == plan.whole_model()

        try:
            return next_best(planned, planned.chosen, is_possible), False
        except PlanError:
            if planned.on_all is None or not self._may_use_all():
                raise
        try:
            return next_best(planned.on_all, planned.chosen, is_possible), True
        except PlanError:
            plan = planned.on_all.plan
            if journal.differentiates_gradients and plan != plan.whole_model():
                raise
            return planned.on_all, True

    def use_all_devices(self, why: str) -> bool:
        """Lays all models out on all devices of the accelerator, where fewer were used, and replays the journal.

        Args:
            why: The reason, for the log.

        Returns:
            False, with nothing changed, if the workers cannot be replaced.
        """
        if not self._may_use_all():
            return False
        self._session.outbox.flush()
        self._move_all_models(why)
        planned = [remote.first_layout.planned for remote in self._models]
        for one in planned:
            logger.say(log.plan_line(one.plan, log.prediction(one.chosen)), logger.NOTICE)
        workers = self._session.restart_workers(self._session.max_devices)
        self._session.outbox.restart(self._restart(workers, max(planned, key=needed_bytes)))
        return True

    def _may_use_all(self) -> bool:
        """Returns whether the journal holds for another number of workers, and every model fits on all devices."""
        journal, models = self._session.outbox.journal, [remote.first_layout.planned for remote in self._models]
        if journal.state.current is not SessionState.REPLAYABLE or journal.passes_outputs_on or not models:
            return False
        if any(planned.on_all is None for planned in models):
            return False
        plans = [plan for planned in models for plan in (planned.plan, planned.on_all.plan)]
        return not journal.is_bound_to_layout or all(plan.tensor * plan.pipeline == 1 for plan in plans)

    def _move_all_models(self, why: str) -> None:
        """Gives every model its plan on all devices; the caller restarts the workers."""
        for remote in self._models:
            remote.first_layout.planned = remote.first_layout.planned.on_all
        logger.say(log.all_devices_line(self._session.max_devices, why))
        device_count.use_all_next_time(self._session)

    def lay_out_again(self, remote: RemoteModel, plan: Plan, reason: str) -> bool:
        """Rebuilds a model under `plan` and replays the journal.

        Returns:
            False, with nothing changed, if the script gave the plan, only the workers have the state, the journal does
            not suit another plan, or `plan` does not fit.
        """
        journal = self._session.outbox.journal
        model = remote.first_layout if remote in self._models else None
        if model is None or journal.state.current is not SessionState.REPLAYABLE or model.planned.is_given:
            return False
        before, task = model.planned.plan, model.planned.task
        if journal.is_bound_to_layout and before.tensor * before.pipeline > 1:
            return False
        candidate = Candidate(plan, task.memory_of(plan), task.usable_bytes, task.step_of(plan), task.usable_host_bytes)
        if not candidate.fits:
            return False
        model.planned = planned = model.planned.instead(candidate)
        logger.say(reason)
        logger.say(log.plan_line(plan, log.prediction(candidate)), logger.NOTICE)
        self._session.outbox.flush()
        self._session.outbox.restart(self._restart(self._session.workers, planned))
        return True

    def _restart(self, workers: WorkerGroup, planned: Planned) -> Restart:
        """Resets all models for a replay on `workers`; `planned` is the model with the new plan."""
        write_selected(planned.plan, planned.task)
        for remote in self._models:
            self._taking_over.planned[remote] = remote.first_layout.planned
            plan = remote.first_layout.planned.plan
            remote.laid_out_again(plan)
            remote.attach()
            self._session.job.has_model(type(remote.root).__name__, str(plan))
        self._session.watch = Watch(self._session.outbox, planned.expected, lambda *_: self._session.stop_watching())
        return Restart(workers, under({remote.owner: remote for remote in self._models}))

    def _give_up(self) -> None:
        """Puts all values back, so that the script can continue with a smaller batch after the error."""
        for remote in self._models:
            for tensor, value in remote.first_layout.values:
                tensor._cell.value = value
        self._session.outbox.state.enter(SessionState.UNREPLAYABLE)
        self._session.outbox.restart(Restart(self._session.restart_workers(), lambda command: command))
