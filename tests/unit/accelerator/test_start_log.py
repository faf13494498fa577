"""How the start of workers reads in the log."""

from __future__ import annotations

from moreh_ap.accelerator import start_log


def test_workers_are_counted_from_one_with_their_addresses():
    assert [start_log.connecting_line(1, 2, "127.0.0.1:5000"), start_log.connecting_line(2, 2, "127.0.0.1:5001")] == [
        "[1/2] Connecting to resources on the server (127.0.0.1:5000)...",
        "[2/2] Connecting to resources on the server (127.0.0.1:5001)...",
    ]
