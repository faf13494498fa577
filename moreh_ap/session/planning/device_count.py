"""How many of the accelerator's devices have a worker: all of them, or fewer where a step is predicted to be faster.

Decides when the number may change, and carries the change out. Must not know how plans of two numbers are compared
(`planner/search/device_counts.py`), nor how commands are replayed (`oom_recovery.py`).

[Note: when the number changes]
Workers join one process group when they start, so another number of them means other workers. It becomes smaller only
before the first model is laid out, when the workers have nothing, and only for a training call: the first call of a
model that is evaluated, such as a frozen teacher, says nothing about the model that will be trained. It is remembered
for the script, whose next run starts with as many workers at once; if the first model of that run is another one, all
devices are used and the number is chosen anew. It grows again while the journal can be replayed: for a second model
that is clearly faster on all devices or fits only there, and after running out of memory. A number that the script or
MOREH_NUM_DEVICES gives is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from moreh_ap import log
from moreh_ap.local import logger
from moreh_ap.planner.search.device_counts import FEWER_MARGIN, faster_on_fewer
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import Ranking
from moreh_ap.session.planning import device_count_records
from moreh_ap.session.planning.device_count_records import DeviceRecord
from moreh_ap.session.replay.restart import Restart
from moreh_ap.session.session import Session
from moreh_ap.states import SessionState


def settle_start(session: Session, identity: str) -> None:
    """Restarts all workers if fewer were started for another model than the script's first one.

    Args:
        session: The session of the workers.
        identity: The model and its batch.
    """
    if not session.uses_fewer_devices or session.outbox.state.current is not SessionState.EMPTY:
        return
    record = device_count_records.of_script(session.options, session.device_type, session.max_devices)
    if record is not None and record.model == identity:
        logger.say(log.remembered_devices_line(record.devices, session.max_devices, record.all_s))
        return
    logger.say(log.other_model_line(session.num_devices, session.max_devices))
    _restart(session, session.max_devices)


def use_fewer(
    session: Session, root: nn.Module, identity: str, all_s: float, rows: int, task_on: Callable[[int], Task | None]
) -> bool:
    """Restarts the workers on fewer devices if a step is predicted to be clearly faster; returns whether it did.

    Args:
        session: The session of the workers, which run on all devices.
        root: A model that is about to be laid out.
        identity: The model and its batch.
        all_s: Predicted seconds of a step on all devices.
        rows: Rows of its batch.
        task_on: Returns the planner's task on so many devices.
    """
    trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in root.parameters())
    is_first = session.outbox.state.current is SessionState.EMPTY and not session.uses_fewer_devices
    if not (trains and is_first and device_count_records.is_open(session.options)):
        return False
    record = device_count_records.of_script(session.options, session.device_type, session.max_devices)
    if record is not None and record.model == identity:
        return False  # an earlier run went back to all
    everything, least = session.max_devices, device_count_records.LEAST_DEVICES[session.device_type]
    ranking = faster_on_fewer(all_s, everything, rows, task_on, least)
    if ranking is None:
        return False
    count, fewer_s = ranking.task.cluster.num_devices, ranking.best.seconds
    logger.say(log.fewer_devices_line(count, everything, fewer_s, all_s))
    key = device_count_records.script_key(session.device_type, everything)
    device_count_records.keep(key, DeviceRecord(identity, count, everything, fewer_s, all_s))
    _restart(session, count)
    return True


def is_faster_on_all(fewer_s: float, on_all: Ranking) -> bool:
    """Returns whether a second model is clearly faster on all devices than on those in use.

    Args:
        fewer_s: Predicted seconds of its step on the devices in use; infinite if nothing fits there.
        on_all: Its plans on all devices.
    """
    return bool(on_all.num_fitting) and on_all.best.seconds < fewer_s * (1 - FEWER_MARGIN)


def use_all_next_time(session: Session) -> None:
    """Records that this script needs all devices, whatever its first model would be faster on."""
    device_count_records.keep_all(device_count_records.script_key(session.device_type, session.max_devices))


def _restart(session: Session, num_devices: int) -> None:
    """Replaces workers that have nothing of the script yet: the journal is empty."""
    session.outbox.flush()
    session.outbox.restart(Restart(session.restart_workers(num_devices), lambda command: command))
