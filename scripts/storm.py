#!/usr/bin/env python
"""Random faults while workers train: whether each is survived, and every number is that of an undisturbed run.

    make test-storm                                         # 100 faults over five plans
    python scripts/storm.py --faults 10 shard=2             # ten under one plan
    python scripts/storm.py --minutes 10 --every 15         # one run, with a fault every 15 seconds
    python scripts/storm.py --seed 7 --faults 20 tensor=2   # those of a storm whose seed was printed
    python scripts/storm.py --hosts --faults 10 shard=2     # over two hosts, which are lost and come back

Decides how many faults of which kinds befall which plan, and what is told of them. What a fault is, `storm_faults.py`
says, and `storm_hosts.py` of hosts; what is trained, `storm_training.py`. Ends with exit code 1 if a fault was not
survived, a number differs, the training stopped for longer than it may, or something is left behind. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import commit, machine
from rich.console import Console
from rich.table import Table
from storm_faults import KINDS, OVER_WITHIN_S, Failed, Storm, Training
from storm_hosts import OF_HOSTS, OF_WORKERS, Hosts, StormOverHosts

PLANS = ("replicate=2", "shard=2", "tensor=2", "pipeline=2,micro_batches=2", "shard=2,tensor=2")
REFERENCE_S = 900.0
FIRST_S = 180.0  # a busy machine starts the workers and lays out the first model


@dataclass
class Outcome:
    """What became of one training.

    Attributes:
        faults: How many befell it.
        survived: How many of them it got over.
        steps: Computed again, because of all of them.
        longest_s: Between two numbers.
        same: Numbers that are those of the undisturbed training, bit for bit.
        numbers: All of them.
        problems: What went wrong, in words.
    """

    plan: str
    faults: int = 0
    survived: int = 0
    steps: int = 0
    longest_s: float = 0.0
    same: int = 0
    numbers: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.problems and self.survived == self.faults and 0 < self.numbers == self.same


def weather(plan: str, folder: Path, arguments: argparse.Namespace, faults: Iterable[str]) -> Outcome:
    """Trains under a plan while faults happen, then undisturbed, and compares.

    Args:
        folder: For the files of both.
        faults: Yields the kind of each fault when it is time for it.
    """
    outcome = Outcome(plan)
    options = ["--copies", str(arguments.copies), "--hang-s", str(arguments.hang_s)]
    chance = random.Random(f"{arguments.seed} {plan}")
    with contextlib.ExitStack() as until_end:
        if arguments.hosts:
            hosts = Hosts(folder)
            until_end.callback(hosts.end)
            training = Training(plan, folder / "disturbed", options, "memory", hosts.variables(), hosts.pids)
            befall(training, StormOverHosts(training, chance, hosts), folder, arguments, faults, outcome)
            outcome.problems += [f"left behind: {name}" for name in hosts.left()]
        else:
            training = Training(plan, folder / "disturbed", options, "memory")
            befall(training, Storm(training, chance), folder, arguments, faults, outcome)
    compare(outcome, training, undisturbed(plan, folder / "undisturbed", options, len(training.lines)))
    return outcome


def befall(
    training: Training,
    storm: Storm,
    folder: Path,
    arguments: argparse.Namespace,
    faults: Iterable[str],
    outcome: Outcome,
) -> None:
    """Has faults befall a training until it ends, and records what became of it; arguments as for `weather`."""
    plan = outcome.plan
    try:
        training.wait_for(lambda: bool(training.lines), FIRST_S)
        for kind in faults:
            outcome.faults += 1
            at_line = len(training.lines)
            survived = storm.strike(kind)
            outcome.survived += 1
            outcome.steps += survived.steps
            if not arguments.quiet:
                print(
                    f"{plan}: fault {outcome.faults}, {kind}, at number {at_line}: "
                    f"over after {survived.seconds:.1f} s, {survived.steps} steps computed again",
                    flush=True,
                )
        (folder / "disturbed" / "enough").touch()
        training.wait_for(lambda: training.process.poll() is not None, OVER_WITHIN_S)
    except Failed as failed:
        if training.process.poll() != 0:
            outcome.problems.append(f"fault {outcome.faults}: {failed}")
    finally:
        if training.process.poll() is None:
            training.process.kill()
    outcome.problems += [f"left behind: {name}" for name in training.end()]
    times_s = [line.at_s for line in training.lines]
    outcome.longest_s = max((after - before for before, after in itertools.pairwise(times_s)), default=0.0)
    if outcome.longest_s > arguments.most_s:
        outcome.problems.append(f"it stopped for {outcome.longest_s:.0f} s")


def undisturbed(plan: str, folder: Path, options: Sequence[str], count: int) -> Training:
    """Returns the same training without faults, and without recovery, after so many numbers."""
    training = Training(plan, folder, [*options, "--lines", str(max(1, count))], "off")
    try:
        training.process.wait(REFERENCE_S)
    finally:
        training.process.kill()
    training.end()
    return training


def compare(outcome: Outcome, training: Training, reference: Training) -> None:
    """Counts the numbers that are equal, and names the first that are not."""
    outcome.numbers = len(training.lines)
    if len(reference.lines) != outcome.numbers:
        outcome.problems.append(f"undisturbed there are {len(reference.lines)} numbers: {reference.last_words()}")
    pairs = list(zip(training.lines, reference.lines))
    other = [index for index, (one, two) in enumerate(pairs) if one[1:] != two[1:]]
    outcome.same = len(pairs) - len(other)
    outcome.problems += [f"number {index + 1} ({pairs[index][0].name}) differs" for index in other[:3]]


def dealt(kinds: Sequence[str], count: int, seed: str) -> list[str]:
    """Returns so many kinds of faults, each as often as the others, in a random order."""
    chance, found = random.Random(seed), []
    while len(found) < count:
        found += chance.sample(kinds, len(kinds))
    return found[:count]


def every(seconds: float, kinds: Iterable[str]) -> Iterator[str]:
    """Yields a kind of fault every so many seconds, or as soon as the last one is over."""
    began_s = time.monotonic()
    for number, kind in enumerate(kinds, 1):
        time.sleep(max(0.0, began_s + number * seconds - time.monotonic()))
        yield kind


def table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Returns what became of all trainings."""
    found = Table(title=title)
    found.add_column("plan")
    for name in ("faults", "survived", "steps computed again", "longest stop", "numbers identical"):
        found.add_column(name, justify="right")
    rows = [(one.plan, one.faults, one.survived, one.steps, one.longest_s, one.same, one.numbers) for one in outcomes]
    if len(rows) > 1:
        columns = list(zip(*rows, strict=True))
        rows.append(("all", *map(sum, columns[1:4]), max(columns[4]), *map(sum, columns[5:])))
    for plan, faults, survived, steps, longest_s, same, numbers in rows:
        found.add_row(plan, str(faults), str(survived), str(steps), f"{longest_s:.1f} s", f"{same} of {numbers}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", help=f"which plans (default: {' '.join(PLANS)}; the second of a long run)")
    parser.add_argument("--faults", type=int, default=100, help="over all plans (default: 100)")
    parser.add_argument("--hosts", action="store_true", help="over two hosts on this machine, with plans for 2 devices")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *OF_HOSTS], help="which (default: all)")
    parser.add_argument("--minutes", type=float, help="one run for so long instead")
    parser.add_argument("--every", type=float, default=15.0, help="there, seconds from one fault to the next")
    parser.add_argument("--seed", type=int, help="decides kinds, workers and moments (default: another one each time)")
    parser.add_argument("--copies", type=int, default=3, help="workers copy what they hold every so many steps")
    parser.add_argument(
        "--hang-s", type=float, default=5.0, help="what is silent for so long hangs; 30 outside of this"
    )
    parser.add_argument("--most-s", type=float, default=30.0, help="seconds that a stop may take (default: 30)")
    parser.add_argument("--folder", type=Path, help="keeps what the trainings print and save")
    parser.add_argument("--quiet", action="store_true", help="print the table alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends what is trained
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10**6)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="storm-"))).resolve()
    arguments.kinds = arguments.kinds or ([*OF_WORKERS, *OF_HOSTS] if arguments.hosts else list(KINDS))
    if not arguments.hosts and set(arguments.kinds) & set(OF_HOSTS):
        parser.error(f"{', '.join(OF_HOSTS)}: with --hosts")
    plans = arguments.plans or (PLANS[1:2] if arguments.minutes or arguments.hosts else PLANS)
    print(f"seed {arguments.seed}, files in {folder}", flush=True)
    outcomes = []
    for index, plan in enumerate(plans):
        long, each_s = arguments.minutes, arguments.every
        count = int(60 * long / each_s) if long else (arguments.faults + index) // len(plans)
        faults: Iterable[str] = dealt(arguments.kinds, count, f"{arguments.seed} {plan} kinds")
        if long:
            faults = every(each_s, faults)
        outcomes.append(weather(plan, folder / str(index), arguments, faults))
    day = datetime.date.today().isoformat()
    title = f"storm of seed {arguments.seed}, {day}, {commit()}, Python {platform.python_version()}, {machine()}"
    Console(width=120).print(table(outcomes, title))
    for one in outcomes:
        for problem in one.problems:
            print(f"{one.plan}: {problem}", file=sys.stderr)
    is_good = all(one.is_good for one in outcomes)
    if is_good and not arguments.folder:
        shutil.rmtree(folder)
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
