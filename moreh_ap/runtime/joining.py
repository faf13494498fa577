"""How worker processes start together: all of them, or an error that says which one could not and why.

Decides what the start of a worker group waits for, and how its failure reads. Must not know commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moreh_ap.errors import MeshStartError, WorkerLostError
from moreh_ap.protocol.encoding import restore_failure
from moreh_ap.runtime.engine_error import EngineError, start_error
from moreh_ap.runtime.launcher import Launcher, Progress
from moreh_ap.runtime.outcome_resolver import PeersHang, failure_of
from moreh_ap.runtime.receiver import Receiver
from moreh_ap.runtime.relay.worker_answer import FAILED, Answer


def launch(
    launcher: Launcher, on_progress: Progress, engine_made: Callable[[], object], is_stopping: Callable[[], bool]
) -> Receiver:
    """Starts processes and lets them join each other.

    Args:
        launcher: What starts them.
        on_progress: Told of each stage.
        engine_made: Called once the engine has registered its own exit handlers.
        is_stopping: Whether the worker group is being closed.

    Returns:
        What receives the workers' answers.

    Raises:
        MeshStartError: A process could not be started or could not join the others.
        Stopping: The worker group is being closed.
    """
    engine, joining = launcher.start(on_progress, engine_made)
    receiver = Receiver(launcher, engine, is_stopping)
    try:
        answers: Sequence[Answer] = receiver.receive(0, 0, joining)
    except PeersHang as hang:
        answers = [hang.answer]
    except WorkerLostError as lost:
        if isinstance(lost.__cause__, EngineError) and lost.__cause__.is_time_out:
            raise start_error(lost.__cause__) from lost
        raise MeshStartError(f"While the workers were joining each other: {lost.fact}", fix=lost.fix) from lost
    failed = next((answer for answer in answers if answer.status == FAILED), None)
    if failed is not None:
        failure = failure_of(failed)
        raise MeshStartError(
            f"Worker {failure.rank} could not join the others: {failure.type_name}: {failure.text}"
        ) from restore_failure(failure)
    return receiver
