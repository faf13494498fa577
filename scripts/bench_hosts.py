#!/usr/bin/env python
"""What a step costs the script's process with many hosts: messages, bytes, CPU time; the workers do nothing.

    python scripts/bench_hosts.py                           # 8, 64 and 512 workers, 8 on each host
    python scripts/bench_hosts.py --hosts 512 --per-host 8  # 4,096 workers: needs 16 GiB

Hosts are processes of this machine. Each has the relay of a host (`moreh_ap/runtime/relay`) and worker processes, which
answer every command at once. Connections are those of real hosts: TLS 1.3 with certificates of the run. A step is as
many messages as one of `tests/process/step_counts.toml` at its most, as long as these, and one wait. Workers answer
what real ones do: to one message the reply to a forward, with a part of the loss of their own, and which parameters
have a gradient; nothing to the others. The step looks at the reply as a session does, and reads the loss. CPU time is
that of this process, all its threads.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from call_counter import CallCounter
from rich.console import Console
from rich.table import Table

from moreh_ap.hosts.certificates import make_credentials
from moreh_ap.hosts.credentials import context_of
from moreh_ap.protocol.encoding import Packed
from moreh_ap.protocol.messages.calls import ForwardReply
from moreh_ap.protocol.messages.tensors import LeafReply
from moreh_ap.runtime.outcome_resolver import OutcomeResolver
from moreh_ap.runtime.relay.command_links import CommandLinks
from moreh_ap.runtime.relay.command_relay import CommandRelay
from moreh_ap.runtime.relay.command_socket import CommandSocket
from moreh_ap.runtime.relay.fan_out import FAN_OUT
from moreh_ap.runtime.relay.frames import Frame, written
from moreh_ap.runtime.relay.worker_values import WorkerValues
from moreh_ap.runtime.relay.written_answers import written_result
from moreh_ap.runtime.shared_memory import make_host_memory
from moreh_ap.session.calls.joined_leaves import joined_leaf
from moreh_ap.session.models.signatures import form_of

HERE = "127.0.0.1"
MESSAGES, MESSAGE_BYTES, PARAMETERS = 3, 1150, 150
WARM_UP_STEPS = 10
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Cost:
    """What a step costs the script's process.

    Attributes:
        hosts: Hosts.
        workers: Workers of all.
        sent: Messages to hosts.
        received: Messages from hosts.
        sent_bytes: Bytes to hosts, before encryption.
        received_bytes: The same from hosts.
        calls: Python calls of the package.
        cpu_ms: CPU time of the process, median.
        wall_ms: Clock time, median: the hosts share this machine's cores, so it says little.
    """

    hosts: int
    workers: int
    sent: float
    received: float
    sent_bytes: int
    received_bytes: int
    calls: int
    cpu_ms: float
    wall_ms: float


def measure(num_hosts: int, per_host: int, steps: int, most: int) -> Cost:
    """Returns what a step costs with so many hosts, of which one talks to `most` at most."""
    children: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = make_credentials([HERE])[HERE].as_files()
            places = [_start_host(Path(folder, str(host)), per_host, files, children) for host in range(num_hosts)]
            context = context_of(files, is_server=False)
            links = CommandLinks(places, per_host, context, lambda host, why: None, most)
            resolver, numbers = OutcomeResolver(), iter(range(1, 1 << 60))

            def step() -> None:
                pending = [links.execute(next(numbers), 0, Packed(b"x" * MESSAGE_BYTES)) for _ in range(MESSAGES)]
                for one in pending:
                    values = resolver.resolve(0, False, one.wait(TIMEOUT_S)).values
                    assert isinstance(values, WorkerValues)
                    if len(values[0]) == 3:
                        _look_at(values)

            for _ in range(WARM_UP_STEPS):
                step()
            received_bytes, calls = _counted(step)
            before, found = (links.num_sent, links.num_received), []
            for _ in range(steps):
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                step()
                found.append((time.process_time() - began_cpu_s, time.perf_counter() - began_s))
            sent, received = links.num_sent - before[0], links.num_received - before[1]
            links.close()
        finally:
            for pid in children:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    cpu_s, wall_s = (statistics.median(values) for values in zip(*found))
    num_bytes = round(sent / steps * (len(pickle.dumps((b"x" * MESSAGE_BYTES, (), ()))) + 25))
    times_ms = (cpu_s * 1e3, wall_s * 1e3)
    return Cost(
        num_hosts, num_hosts * per_host, sent / steps, received / steps, num_bytes, received_bytes, calls, *times_ms
    )


def _look_at(values: WorkerValues) -> None:
    """Does what a session does with the answers of a step."""
    reply, reached = values.item(1), values.item(2)
    if form_of(reply) is None or len(reached.distinct()) != 1:
        raise RuntimeError("the workers did not answer what they were to")
    if joined_leaf(reply, 0) is None:
        raise RuntimeError("the loss is not there")


def _counted(step: Callable[[], object]) -> tuple[int, int]:
    """Returns the bytes from hosts and the calls of a step."""
    counter, num_bytes = CallCounter(), 0
    original = CommandLinks._take

    def take(links: CommandLinks, index: int, frame: Frame) -> None:
        nonlocal num_bytes
        num_bytes += len(written(*frame))
        original(links, index, frame)

    with patch.object(CommandLinks, "_take", take):
        calls = sum(counter.count(step).values())
    return num_bytes, calls


def _start_host(folder: Path, per_host: int, files: dict[str, str], children: list[int]) -> tuple[str, int]:
    """Starts a host in processes of its own."""
    folder.mkdir()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        ours.close()
        try:
            relay = CommandRelay(folder, per_host, HERE, files, make_host_memory())
            for index in range(per_host):
                if os.fork() == 0:
                    _work(CommandSocket(relay.path, index))
            theirs.sendall(relay.port.to_bytes(4, "big"))
            theirs.recv(1)  # the end of this process's parent
        finally:
            os._exit(0)
    os.setpgid(pid, pid)
    children.append(pid)
    theirs.close()
    port = int.from_bytes(ours.recv(4), "big")
    _kept.append(ours)
    return HERE, port


_kept: list[socket.socket] = []


def _work(connection: CommandSocket) -> None:
    loss = LeafReply("share", (), torch.float32, True, os.getpid().to_bytes(4, "little"), is_operand=True)
    reply = ForwardReply(b"x" * 64, (loss,), "split", "", rows=8)
    while (frame := connection.receive()) is not None:
        result = [None] if frame.number % MESSAGES else [None, reply, b"\1" * PARAMETERS]
        connection.answer(frame, written_result(result), has_failed=False)
    os._exit(0)


def main() -> int:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--fan-out", type=int, default=FAN_OUT, help="hosts that one talks to at most")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    most = max(args.hosts) * (args.per_host + 8) + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, most), hard), hard))
    costs = [measure(num_hosts, args.per_host, args.steps, args.fan_out) for num_hosts in args.hosts]
    table = Table(title=f"a step of {MESSAGES} messages in the script's process")
    for column in ("hosts", "workers", "messages out", "in", "bytes out", "in", "calls", "CPU [ms]", "clock [ms]"):
        table.add_column(column, justify="right")
    for one in costs:
        table.add_row(str(one.hosts), f"{one.workers:,}", f"{one.sent:g}", f"{one.received:g}",
                      f"{one.sent_bytes:,}", f"{one.received_bytes:,}", str(one.calls),
                      f"{one.cpu_ms:.2f}", f"{one.wall_ms:.1f}")  # fmt: skip
    Console(width=110).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in costs], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
