"""An executor for the tests of the runtime: commands are tuples of a name and arguments."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class UnpicklableError(Exception):
    """Does not survive pickling: its constructor wants two arguments, pickle gives it one."""

    def __init__(self, fact: str, number: int) -> None:
        super().__init__(f"{fact} {number}")


class Executor:
    def __init__(self, rank: int, world_size: int, device_type: str) -> None:
        self.rank, self.world_size, self.device_type = rank, world_size, device_type
        self.log: list[Any] = []

    def execute(self, command: tuple[Any, ...]) -> Any:
        name, *arguments = command
        return getattr(self, "do_" + name)(*arguments)

    def do_echo(self, value: Any) -> Any:
        return value

    def do_rank(self) -> int:
        return self.rank

    def do_append(self, value: Any) -> None:
        self.log.append(value)

    def do_log(self) -> list[Any]:
        return self.log

    def do_sum(self, values: bytes | np.ndarray) -> int:
        return int(np.frombuffer(values, dtype=np.uint8).sum())

    def do_all_reduce(self, value: float) -> float:
        tensor = torch.tensor(value * (self.rank + 1))
        dist.all_reduce(tensor)
        return tensor.item()

    def do_environment(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def do_facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "group": os.getpgid(0),
            "threads": torch.get_num_threads(),
            "modules": [name for name in ("torch", "colorsys") if name in sys.modules],
            "listening": _addresses_listening(),
        }

    def do_print(self, *lines: str) -> None:
        for line in lines:
            print(line.format(rank=self.rank))

    def do_print_error(self, line: str) -> None:
        print(line.format(rank=self.rank), file=sys.stderr)

    def do_log_record(self, text: str) -> None:
        logging.getLogger("test").warning(text)

    def do_evaluate(self, text: str) -> Any:
        return eval(text)

    def do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def do_raise(self, error: BaseException, ranks: list[int] | None = None) -> str:
        if ranks is None or self.rank in ranks:
            raise error
        return "did not raise"

    def do_raise_unpicklable(self) -> None:
        raise UnpicklableError("broken", 7)

    def do_raise_of_main(self, function: bytes) -> None:
        import cloudpickle

        cloudpickle.loads(function)()

    def do_raise_then_collective(self, failing_rank: int) -> None:
        if self.rank == failing_rank:
            raise ValueError("one of us failed")
        dist.barrier()

    def do_die(self, rank: int, how: str) -> None:
        if self.rank == rank:
            if how == "exit":
                os._exit(3)
            ctypes.string_at(0)
        dist.barrier()

    def do_unpicklable_result(self) -> Any:
        return lambda: None

    def do_start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def _addresses_listening() -> list[str]:
    """Returns the IPv4 and IPv6 addresses on which this process listens, in hexadecimal as the kernel prints them."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.append(fields[1].split(":")[0])
    return found
