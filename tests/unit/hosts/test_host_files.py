"""Files that a host is sent."""

from __future__ import annotations

import pytest

from moreh_ap.hosts.host_files import (
    DATA,
    FOLDER_VARIABLE,
    WRITTEN,
    HostFiles,
    digest,
    path_here,
    path_to_write,
    pieces,
    sent_name,
)


def test_a_worker_opens_what_was_sent_and_otherwise_the_path_itself(tmp_path, monkeypatch):
    original = tmp_path / "model.safetensors"
    original.write_bytes(b"0123456789")
    files = HostFiles(tmp_path / "files")
    assert path_here(str(original)) == str(original)
    monkeypatch.setenv(FOLDER_VARIABLE, str(files.folder))
    assert path_here(str(original)) == str(original)
    for index, piece in enumerate((b"01234", b"56789")):
        files.write(DATA, sent_name(str(original)), piece, is_first=index == 0)
    assert path_here(str(original)) != str(original) and digest(path_here(str(original))) == digest(str(original))


def test_a_large_file_is_read_piece_by_piece_and_an_empty_one_is_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("moreh_ap.hosts.host_files.PIECE_BYTES", 4)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert list(pieces(str(tmp_path / "file"))) == [b"0123", b"4567", b"89"]
    (tmp_path / "empty").touch()
    assert list(pieces(str(tmp_path / "empty"))) == [b""]


@pytest.mark.parametrize(("area", "name"), [(DATA, "../x"), (DATA, "/etc/x"), ("elsewhere", "x"), (DATA, "a/../../x")])
def test_no_file_is_written_elsewhere(tmp_path, area, name):
    with pytest.raises(ValueError, match="outside"):
        HostFiles(tmp_path).write(area, name, b"", is_first=True)


def test_a_worker_writes_where_it_is_told_to_if_it_sees_the_witness(tmp_path, monkeypatch):
    file, witness = tmp_path / "new-worker1.safetensors", tmp_path / "new-witness"
    assert path_to_write(str(file), str(witness)) == str(file), "not on another host"
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "host"))
    witness.touch()
    assert path_to_write(str(file), str(witness)) == str(file)


def test_a_worker_that_shares_no_folder_writes_into_one_of_its_host_without_what_an_earlier_save_left(
    tmp_path, monkeypatch
):
    own = tmp_path / "host" / WRITTEN
    own.mkdir(parents=True)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "host"))
    for name in ("old-worker1.safetensors", "old-worker11.safetensors"):
        (own / name).touch()
    assert path_to_write("/elsewhere/new-worker1.safetensors", "/elsewhere/new-witness") == str(
        own / "new-worker1.safetensors"
    )
    assert [path.name for path in own.iterdir()] == ["old-worker11.safetensors"]


@pytest.mark.parametrize("name", ["../data/x", "/etc/passwd", "a/../../x"])
def test_nothing_is_taken_from_elsewhere(tmp_path, name):
    with pytest.raises(ValueError, match="outside"):
        HostFiles(tmp_path).read_piece(name, 0)
    with pytest.raises(ValueError, match="outside"):
        HostFiles(tmp_path).remove(name)
