"""Commands that read and write the files of a checkpoint."""

from __future__ import annotations

from moreh_ap.hosts.host_files import path_to_write
from moreh_ap.parallelizer.state.background_writing import write_in_background
from moreh_ap.parallelizer.state.checkpoint_files import WrittenFile, problem_with, write_file
from moreh_ap.parallelizer.state.checkpoint_shards import boxes_of
from moreh_ap.parallelizer.state.loading import Wanted, read
from moreh_ap.protocol.messages.checkpoints import CheckFiles, ReadCheckpoint, WriteCheckpoint
from moreh_ap.runtime.worker.commands.tables import Handlers, Tables


class CheckpointCommands:
    """Executes them."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {ReadCheckpoint: self._read, WriteCheckpoint: self._write, CheckFiles: self._check}

    def _read(self, command: ReadCheckpoint) -> None:
        wanted: list[Wanted] = []
        for ref, saved in command.values.items():
            held = self._tables.state(ref)
            if held is not None:
                wanted += (Wanted(ref.name, held.tensor, source, held.layout) for source in saved.sources)
        read(wanted)

    def _write(self, command: WriteCheckpoint) -> WrittenFile | None:
        self._tables.device.synchronize()  # copies to host memory may be on their way
        boxes = boxes_of({name: self._tables.state(ref, fetch=False) for name, ref in command.tensors.items()})
        path = f"{command.path}{self._tables.rank}.safetensors"
        if command.in_background:
            return write_in_background(path, boxes)
        return write_file(path_to_write(path, command.witness) if command.witness else path, boxes)

    def _check(self, command: CheckFiles) -> dict[str, str]:
        own = command.files[self._tables.rank :: self._tables.world_size]
        found = {path: problem_with(path, num_bytes, sha256) for path, num_bytes, sha256 in own}
        return {path: problem for path, problem in found.items() if problem}
