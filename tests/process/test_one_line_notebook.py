"""A notebook: cells in any order, an error and another try, an interrupted cell, a restarted kernel."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from user_script import ENVIRONMENT

jupyter = pytest.importorskip("jupyter_client", reason="needs jupyter_client and ipykernel")
pytest.importorskip("ipykernel", reason="needs jupyter_client and ipykernel")

SET_UP = """
import torch
from torch import nn
torch.moreh.option.enable_advanced_parallelization(devices=2)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x):
        return self.linear(x).square().mean()
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
def train(count):
    for step in range(count):
        loss = model(torch.randn(8, 4).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss
"""


class Notebook:
    """A kernel, and what its cells answer."""

    def __init__(self, folder) -> None:
        self.manager = jupyter.KernelManager(kernel_name="python3")
        self.manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, **ENVIRONMENT})
        self.client = self.manager.blocking_client()
        self.connect()

    def connect(self) -> None:
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, timeout_s: float = 60) -> tuple[str, str]:
        """Runs a cell; returns what it printed, and the name of its error, if any."""
        printed: list[str] = []

        def show(message) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
            elif message["msg_type"] == "execute_result":
                printed.append(message["content"]["data"]["text/plain"])
            elif message["msg_type"] == "error":
                printed.extend(message["content"]["traceback"])

        reply = self.client.execute_interactive(code, timeout=timeout_s, output_hook=show)["content"]
        while reply["status"] == "aborted":  # it came so soon after an error that the kernel dropped it
            reply = self.client.execute_interactive(code, timeout=timeout_s, output_hook=show)["content"]
        return "".join(printed), reply.get("ename", "")

    def workers(self) -> list[int]:
        """Returns the process ids of all workers, which may have to start: small models do not wait for them."""
        out, error = self.run(
            "from moreh_ap import device; workers = device.current().session.workers; workers.wait_ready()\n"
            "print('pids', *workers.pids)"
        )
        assert not error, out
        return [int(pid) for pid in out.split("pids")[1].split()]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path):
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


def gone(pids: list[int], timeout_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_cells_run_fail_are_interrupted_and_run_again(notebook):
    out, error = notebook.run(SET_UP)
    assert not error, out
    out, error = notebook.run("print(f'the loss is {train(5):.3f}')")
    assert not error and "the loss is" in out, out
    assert "event loop" not in out and "Warning" not in out, out

    out, error = notebook.run("model(torch.randn(8, 5).cuda())")
    assert error == "RuntimeError"
    out, error = notebook.run("train(5).item()")
    assert not error and float(out.splitlines()[-1]) > 0, out

    workers = notebook.workers()
    notebook.client.execute("while True: train(1).item(); print('.', end='', flush=True)")
    wait_for_stream(notebook)
    start_s = time.monotonic()
    os.kill(notebook.manager.provisioner.pid, signal.SIGINT)
    assert reply_of(notebook)["ename"] == "KeyboardInterrupt"
    assert time.monotonic() - start_s < 5
    out, error = notebook.run("train(5).item()")
    assert not error and float(out.splitlines()[-1]) > 0, out
    assert notebook.workers() == workers, "the same workers went on"

    out, error = notebook.run(SET_UP)
    assert not error, "the first cell may be run again"
    out, error = notebook.run("train(5).item()")
    assert not error and float(out.splitlines()[-1]) > 0, out

    notebook.client.stop_channels()
    notebook.manager.restart_kernel(now=True)
    notebook.client = notebook.manager.blocking_client()
    notebook.connect()
    assert gone(workers)
    out, error = notebook.run(SET_UP + "\nprint(train(2).item() > 0)")
    assert not error and out.endswith("True\n"), out
    workers = notebook.workers()
    notebook.close()
    assert gone(workers)


def wait_for_stream(notebook: Notebook) -> None:
    """Waits until the running cell has printed something."""
    while notebook.client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
        pass


def reply_of(notebook: Notebook) -> dict:
    """Returns the reply to the running cell."""
    return notebook.client.get_shell_msg(timeout=30)["content"]
