"""Files that workers wrote on hosts which do not share the checkpoint's folder."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from moreh_ap.errors import WorkerLostError
from moreh_ap.parallelizer.state.checkpoint_files import WrittenFile
from moreh_ap.protocol.messages.checkpoints import WriteCheckpoint
from moreh_ap.session.checkpoint.new_checkpoint import NewCheckpoint
from moreh_ap.session.checkpoint.workers_files import _taken, written


class Workers:
    """Takes what it is told to, with the digests that it is made with."""

    def __init__(self, digests):
        self.digests, self.asked = digests, {}

    def take(self, written):
        self.asked = dict(written)
        return {rank: self.digests[rank] for rank, (_, here) in written.items() if here}


def test_files_of_hosts_that_share_the_folder_stay_where_they_are():
    files, workers = [WrittenFile("/ckpt/1-worker0.safetensors", 8, "a", ()), None], Workers({})
    assert _taken(workers, files, "/ckpt/1-worker") == files and not workers.asked


def test_files_of_other_hosts_are_taken_compared_and_removed_if_they_could_not_be_written():
    here = WrittenFile("/ckpt/1-worker0.safetensors", 8, "a", ())
    there = [WrittenFile(f"/tmp/host/written/1-worker{rank}.safetensors", 8, "b", ()) for rank in (1, 2, 3)]
    there[2] = replace(there[2], failure="OSError: No space left on device")
    workers = Workers({1: "b", 2: "other"})
    found = _taken(workers, [here, *there], "/ckpt/1-worker")
    assert [(rank, path) for rank, (_, path) in workers.asked.items()] == [
        (1, "/ckpt/1-worker1.safetensors"),
        (2, "/ckpt/1-worker2.safetensors"),
        (3, ""),
    ]
    assert found[:2] == [here, replace(there[0], path="/ckpt/1-worker1.safetensors")]
    assert "it is not what worker 2 wrote on its host" in found[2].failure
    assert found[3].failure == "on the host of worker 3: OSError: No space left on device"


class Losing(Workers):
    """Workers of which so many in turn have a host that is lost with what it has written."""

    def __init__(self, num_lost):
        super().__init__({0: "b", 1: "b"})
        self.num_lost = num_lost

    def take(self, written):
        for _, here in written.values():  # of a host that is not lost
            open(here, "x").close()
        if self.num_lost:
            self.num_lost -= 1
            raise WorkerLostError("The host b is lost, and what it has saved: cut.", fix="moreh-ap doctor --hosts b")
        return super().take(written)


@pytest.fixture
def saving(tmp_path):
    """Returns a save by workers of which so many are lost, and what they were told."""

    def begin(num_lost):
        told, folder = [], str(tmp_path)

        def submit(command):
            told.append(command)
            files = [WrittenFile(f"/tmp/host/written/1-worker{rank}.safetensors", 8, "b", ()) for rank in (0, 1)]
            return SimpleNamespace(result=lambda: files)

        session = SimpleNamespace(workers=Losing(num_lost), outbox=SimpleNamespace(submit=submit))
        new = NewCheckpoint(folder, 2)
        command = WriteCheckpoint(new.path("worker"), {}, "witness")
        return lambda: written(session, command, submit(command), new), told, new

    return begin


def test_what_a_host_is_lost_with_is_written_once_more_by_those_that_take_over(saving, capsys):
    save, told, new = saving(1)
    assert [file.path for file in save()] == [new.path(f"worker{rank}.safetensors") for rank in (0, 1)]
    assert told[0] is told[1] and len(told) == 2
    new.give_up()


def test_where_a_host_is_lost_in_the_second_try_the_error_says_which_checkpoint_stays(saving, tmp_path):
    save, told, new = saving(2)
    with pytest.raises(WorkerLostError, match=r"host b is lost.*\n.* has no checkpoint yet\.") as raised:
        save()
    assert len(told) == 2 and raised.value.fix == "moreh-ap doctor --hosts b"
    new.give_up()
