"""Boxes that a thread writes: their elements of the call, and a note of how it ended, whatever happens to the file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moreh_ap.parallelizer.state import background_writing
from moreh_ap.parallelizer.state.background_writing import (
    forget_what_was_written,
    is_going_on,
    what_was_written,
    write_in_background,
)
from moreh_ap.parallelizer.state.checkpoint_files import Box, WrittenFile


def finished(path: Path) -> WrittenFile | None:
    """Waits for the thread, and returns what its note says."""
    for thread in threading.enumerate():
        if thread.name == "moreh-checkpoint":
            thread.join(60)
    is_through, written = what_was_written(str(path))
    assert is_through
    return written


def test_what_is_written_is_what_was_there_at_the_call(tmp_path, monkeypatch):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(7)}
    begins = threading.Event()
    write_file = background_writing.write_file
    monkeypatch.setattr(background_writing, "write_file", lambda *given: begins.wait(60) and write_file(*given))
    path = tmp_path / "one.safetensors"
    boxes = [Box.of(name, tensor, tensor.detach) for name, tensor in tensors.items()]
    wanted = [tensor.clone() for tensor in tensors.values()]
    write_in_background(str(path), boxes)
    assert what_was_written(str(path)) == (False, None) and is_going_on()
    for tensor in tensors.values():
        tensor.zero_()
    begins.set()
    written = finished(path)
    assert written is not None and not written.failure and path.stat().st_size == written.num_bytes
    found = load_file(path)
    for box, tensor in zip(written.boxes, wanted, strict=True):
        assert torch.equal(found[box.key], tensor) and found[box.key].dtype == tensor.dtype
    assert not is_going_on()
    forget_what_was_written(str(path))
    assert what_was_written(str(path)) == (False, None)


def test_nothing_to_write_is_noted_too(tmp_path):
    write_in_background(str(tmp_path / "none.safetensors"), [])
    assert finished(tmp_path / "none.safetensors") is None


def test_where_there_is_no_memory_the_file_is_written_at_once(tmp_path, monkeypatch):
    def refuse(boxes):
        raise MemoryError

    monkeypatch.setattr(background_writing, "_copied", refuse)
    tensor, path = torch.ones(3), tmp_path / "one.safetensors"
    write_in_background(str(path), [Box.of("a", tensor, tensor.detach)])
    is_through, written = what_was_written(str(path))
    assert is_through and written is not None and not written.failure


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd")])
def test_a_file_that_cannot_be_written_is_removed_and_noted(tmp_path, monkeypatch, error):
    """On a full disk the note needs the room of the file."""

    def fail():
        raise error

    monkeypatch.setattr(background_writing, "_copied", list)
    tensor, path = torch.ones(3), tmp_path / "one.safetensors"
    write_in_background(str(path), [Box.of("a", tensor, tensor.detach), Box.of("b", tensor, fail)])
    written = finished(path)
    assert written is not None and written.failure == f"{type(error).__name__}: {error}"
    forget_what_was_written(str(path))
    assert not list(tmp_path.iterdir())


def test_what_a_lost_worker_has_left_is_replaced_and_what_it_had_completed_stays(tmp_path):
    path = tmp_path / "one.safetensors"
    Path(f"{path}~").write_bytes(b"the beginning of a fi")
    write_in_background(str(path), [Box.of("a", torch.ones(3), torch.ones(3).detach)])
    written = finished(path)
    assert written is not None and not written.failure and path.stat().st_size == written.num_bytes
    assert load_file(path)["a[0:3]"].tolist() == [1.0, 1.0, 1.0]
    write_in_background(str(path), [Box.of("a", torch.zeros(3), torch.zeros(3).detach)])
    assert finished(path) == written and load_file(path)["a[0:3]"].tolist() == [1.0, 1.0, 1.0]


def test_a_disk_without_room_for_a_note_is_said_by_an_empty_one(tmp_path, monkeypatch):
    def fill(path, boxes):
        monkeypatch.setattr(background_writing.pickle, "dump", refuse)  # others have filled the disk meanwhile
        return

    def refuse(*unused):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(background_writing, "write_file", fill)
    tensor, path = torch.ones(3), tmp_path / "one.safetensors"
    assert write_in_background(str(path), [Box.of("a", tensor, tensor.detach)]) is None
    written = finished(path)
    assert written is not None and written.failure == "OSError: [Errno 28] No space left on device"


def test_a_folder_in_which_no_note_can_be_made_is_said_at_once(tmp_path):
    tensor, path = torch.ones(3), tmp_path / "gone" / "one.safetensors"
    written = write_in_background(str(path), [Box.of("a", tensor, tensor.detach)])
    assert written is not None and "No such file or directory" in written.failure and not is_going_on()
