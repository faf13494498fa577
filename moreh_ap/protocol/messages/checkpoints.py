"""Training checkpoints, written and read by the workers."""

from __future__ import annotations

from dataclasses import dataclass

from moreh_ap.protocol.messages.tensors import SavedTensor, StateRef


@dataclass(frozen=True)
class ReadCheckpoint:
    """Set state tensors to values that lie in files; each worker reads its shard."""

    values: dict[StateRef, SavedTensor]


@dataclass(frozen=True)
class WriteCheckpoint:
    """Write state tensors, by their names in the checkpoint, into a file for each worker.

    Its path is ``{path}{rank}.safetensors``; where a worker does not see the file `witness`, one of that name in a
    folder of its host. Answers a `WrittenFile`, None if nothing of them counts on this worker.

    `in_background`: the answer comes once the worker has copied its elements, None unless it could not begin;
    `background_writing` says what it has written.
    """

    path: str
    tensors: dict[str, StateRef]
    witness: str = ""
    in_background: bool = False


@dataclass(frozen=True)
class CheckFiles:
    """Compare files with their sizes in bytes and checksums, every worker some of them: ``(path, size, sha256)``.

    Answers ``{path: what is wrong}``, of the files that this worker looked at.
    """

    files: tuple[tuple[str, int, str | None], ...]
