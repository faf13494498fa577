"""How the start of workers reads in the log."""

from __future__ import annotations

from moreh_ap.accelerator import start_log


def test_start_up_lines():
    lines = start_log.startup_lines(["127.0.0.1:5000", "127.0.0.1:5001"], "0.1.0", 42)
    assert lines[2:4] == [
        "[1/2] Connecting to resources on the server (127.0.0.1:5000)...",
        "[2/2] Connecting to resources on the server (127.0.0.1:5001)...",
    ]
    assert lines[5] == "MoAI Accelerator is ready to use."
