"""What becomes of files that workers wrote on hosts which do not share the checkpoint's folder."""

from __future__ import annotations

from dataclasses import replace

from moreh_ap.parallelizer.state.checkpoint_shards import WrittenFile
from moreh_ap.session.checkpoint.training_checkpoint import _taken


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
