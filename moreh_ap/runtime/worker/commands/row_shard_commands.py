"""Commands about large tensors of which each worker holds its rows."""

from __future__ import annotations

from moreh_ap.protocol.messages.row_shards import ReadRowShard, ReleaseRowShards, RunOnRowShards, WriteRowShard
from moreh_ap.protocol.messages.tensors import LeafReply, OutputRef, RowShardRef
from moreh_ap.runtime.worker.commands.tables import Handlers, Tables
from moreh_ap.runtime.worker.row_shard_store import RowShard, answer, convert_memory_of, run_on_row_shards


class RowShardCommands:
    """Executes them."""

    def __init__(self, tables: Tables) -> None:
        self._tables, self._shards = tables, tables.row_shards

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {
            RunOnRowShards: self._run,
            ReadRowShard: self._read,
            WriteRowShard: self._write,
            ReleaseRowShards: self._release,
        }

    def _shard(self, ref: RowShardRef | OutputRef) -> RowShard | None:
        if isinstance(ref, RowShardRef):
            return self._shards[ref.number]
        return self._tables.calls[ref.call_id].row_shard(ref.index)

    def _run(self, command: RunOnRowShards) -> list[LeafReply | None] | None:
        results = run_on_row_shards(command, self._shard, self._tables.device.place, self._convert)
        if results is None:
            self._shards.update(dict.fromkeys(command.outputs))
            return None
        self._shards.update(zip(command.outputs, results))
        return answer(results) if results and results[0].answers else None

    def _convert(self, shard: RowShard) -> None:
        convert_memory_of(shard, self._shards.values())

    def _read(self, command: ReadRowShard) -> LeafReply | None:
        shard = self._shards[command.number]
        return None if shard is None else shard.reply()

    def _write(self, command: WriteRowShard) -> None:
        shard = self._shards[command.number]
        if shard is not None:
            self._convert(shard)
            shard.write(self._tables.device.place(command.full))

    def _release(self, command: ReleaseRowShards) -> None:
        for number in command.numbers:
            self._shards.pop(number, None)
