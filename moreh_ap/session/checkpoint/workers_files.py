"""What workers write of a checkpoint, until all of it is in the checkpoint's folder.

Decides whether it is written anew where a host is lost with its part. Must not know what is in the files, nor how they
become the checkpoint (`new_checkpoint.py`).

[Note: a host that is lost with its part]
Hosts that do not share the folder write on their own disks, and what they have written moves here afterwards. The
command that wrote it has been answered by then, so workers that take over do not repeat it. They hold the same state,
since the script waits here, and are told to write once more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from moreh_ap.errors import WorkerLostError
from moreh_ap.local import logger
from moreh_ap.parallelizer.state.background_writing import forget_what_was_written, what_was_written
from moreh_ap.parallelizer.state.checkpoint_files import WrittenFile
from moreh_ap.protocol.messages.checkpoints import WriteCheckpoint
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.checkpoint.new_checkpoint import NewCheckpoint
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session

_POLL_S = 0.02
"""How often a save in the background looks for what workers have written: two hundred looks cost a millisecond."""


def written_in_background(workers: WorkerGroup, posted: Posted, path: str) -> list[WrittenFile | None]:
    """Waits, in a thread that is not the script's, for what workers write in the background, and returns it.

    Raises:
        OSError: The workers have ended before.
    """
    waiting = set(range(workers.num_workers))
    files: list[WrittenFile | None] = []
    answers: Sequence[WrittenFile | None] = ()
    while waiting:
        has_ended = posted.failed() or workers.is_stopped()
        if not answers and posted.done() and not has_ended:
            answers = posted.result()  # at once; an error of before would have had this skipped
        for rank in sorted(waiting):
            is_through, file = what_was_written(f"{path}{rank}.safetensors")
            if not is_through and answers and answers[rank] is not None:  # it could not begin
                is_through, file = True, answers[rank]
            if is_through:
                files.append(file)
                waiting.remove(rank)
        if waiting and has_ended:
            raise OSError(f"{path}{min(waiting)}.safetensors: the workers ended, or failed, before they had written it")
        if waiting:
            time.sleep(_POLL_S)
    for rank in range(workers.num_workers):
        forget_what_was_written(f"{path}{rank}.safetensors")
    return files


def written(session: Session, command: WriteCheckpoint, posted: Posted, new: NewCheckpoint) -> list[WrittenFile | None]:
    """Returns what workers have written, in the checkpoint's folder. See [Note: a host that is lost with its part].

    Args:
        session: The session of the workers.
        command: What they were told.
        posted: Their answers, which are still to come.
        new: The checkpoint.

    Raises:
        WorkerLostError: A host is lost with its part, and no others can write it.
        OSError: A file could not be moved.
    """
    files = posted.result()
    try:
        return _taken(session.workers, files, command.path)
    except WorkerLostError as lost:
        logger.say(f"{lost.fact} It is saved once more.", logger.NOTICE)
    try:
        new.remove_workers_files()
        return _taken(session.workers, session.outbox.submit(command).result(), command.path)
    except WorkerLostError as again:
        raise WorkerLostError(f"{again.fact}\n{new.what_stays()}", again.allowed, again.fix, again.link) from again


def _taken(workers: WorkerGroup, files: Sequence[WrittenFile | None], path: str) -> list[WrittenFile | None]:
    """Returns what workers wrote once all of it is in the checkpoint's folder: files of hosts that do not share it are
    moved here, piece by piece."""
    wanted = {rank: f"{path}{rank}.safetensors" for rank in range(len(files))}
    elsewhere = {rank: file for rank, file in enumerate(files) if file is not None and file.path != wanted[rank]}
    if not elsewhere:
        return list(files)
    digests = workers.take(
        {rank: (file.path, "" if file.failure else wanted[rank]) for rank, file in elsewhere.items()}
    )
    taken = list(files)
    for rank, file in elsewhere.items():
        if file.failure:  # of a host: the path alone would not say so
            taken[rank] = replace(file, failure=f"on the host of worker {rank}: {file.failure}")
        elif digests[rank] != file.sha256:
            taken[rank] = replace(file, failure=f"it is not what worker {rank} wrote on its host: the checksum differs")
        else:
            taken[rank] = replace(file, path=wanted[rank])
    return taken
