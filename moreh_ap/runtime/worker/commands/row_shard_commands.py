"""Commands about large tensors of which each worker holds its rows."""

from __future__ import annotations

from moreh_ap.protocol.messages.row_shards import ReadPart, ReleaseParts, RunOnParts, WritePart
from moreh_ap.protocol.messages.tensors import LeafReply, OutputRef, PartRef
from moreh_ap.runtime.worker.local_shards import Part, answer, run_on_parts
from moreh_ap.runtime.worker.tables import Handlers, Tables


class RowShardCommands:
    """Executes them."""

    def __init__(self, tables: Tables) -> None:
        self._tables, self._parts = tables, tables.parts

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {RunOnParts: self._run, ReadPart: self._read, WritePart: self._write, ReleaseParts: self._release}

    def _part(self, ref: PartRef | OutputRef) -> Part | None:
        if isinstance(ref, PartRef):
            return self._parts[ref.number]
        return self._tables.calls[ref.call_id].part(ref.index)

    def _run(self, command: RunOnParts) -> list[LeafReply | None] | None:
        results = run_on_parts(command, self._part, self._tables.device.place)
        if results is None:
            self._parts.update(dict.fromkeys(command.outputs))
            return None
        self._parts.update(zip(command.outputs, results))
        return answer(results) if results and results[0].answers else None

    def _read(self, command: ReadPart) -> LeafReply | None:
        part = self._parts[command.number]
        return None if part is None else part.reply()

    def _write(self, command: WritePart) -> None:
        part = self._parts[command.number]
        if part is not None:
            part.write(self._tables.device.place(command.whole))

    def _release(self, command: ReleaseParts) -> None:
        for number in command.numbers:
            self._parts.pop(number, None)
