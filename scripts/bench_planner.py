"""Measures every plan that the search looks at for a small model, and where the planner's choice stands among them.

    python scripts/bench_planner.py --devices 2 4 --rounds 2
    python scripts/bench_planner.py --hidden 512 --layers 4 --batch 16 --length 64

The model is a Llama on CPU workers, float32 unless --mixed-precision. Every plan trains a model of its own in the same
process and on the same workers; rounds go through the plans in turn, forwards and backwards, so that a busy neighbour
hits none of them alone. A plan's time is the least of its rounds' medians. The processors' time is what the workers'
threads computed in a step, over the cores that they have: on a busy machine it says more than the clock, and where
workers outnumber cores it is what a step takes on an idle one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moreh_ap import device
from moreh_ap.accelerator.enabling import enable
from moreh_ap.plan import Plan
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.session.planning.first_call import family_of
from moreh_ap.session.planning.machine_profile import machine_of
from moreh_ap.session.planning.model_profiling import profile_model, shape_of
from moreh_ap.session.planning.plan_selection import constraints_of
from moreh_ap.settings import Options

STEPS = 6


@dataclass(frozen=True)
class Workload:
    """A model and its batch."""

    config: LlamaConfig
    batch: int
    length: int


@dataclass(frozen=True)
class Measured:
    """Seconds of a step: by the clock, and of the workers' processors over their cores."""

    seconds: float
    processor_s: float

    def least(self, other: Measured) -> Measured:
        """Returns the smaller of both figures."""
        return Measured(min(self.seconds, other.seconds), min(self.processor_s, other.processor_s))


def processor_seconds() -> float:
    """Returns what the threads of all processes that this one started have computed so far."""
    nanoseconds = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                nanoseconds += sum(int(one.read_text().split()[0]) for one in process.glob("task/*/schedstat"))
    return nanoseconds / 1e9


def step_of(plan: Plan, options: Options, work: Workload) -> Measured:
    """Returns the median step of a new model under a plan; the first one is left out."""
    current = device.current()
    assert current is not None
    current.options = current.session.options = replace(options, plan=plan)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        model = LlamaForCausalLM(work.config).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, work.config.vocab_size, (work.batch, work.length)).cuda()
        seconds, processors = [], []
        for _ in range(STEPS):
            torch.cuda.synchronize()
            computed_s, started_s = processor_seconds(), time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_s)
            processors.append(processor_seconds() - computed_s)
        current.session.watch = None
        model.cpu()
    cores = min(plan.num_devices, len(os.sched_getaffinity(0)))
    return Measured(statistics.median(seconds[1:]), statistics.median(processors[1:]) / cores)


def task_of(options: Options, work: Workload) -> Task:
    """Returns the planner's task on the workers, whose rates are measured if they never were."""
    current = device.current()
    assert current is not None
    model = LlamaForCausalLM(work.config)
    machine, shape = machine_of(current.session), shape_of(model)
    ids = torch.zeros(work.batch, work.length, dtype=torch.long)
    profile = profile_model(model, shape, (model, (), {"input_ids": ids}), work.batch)
    left = constraints_of(options, family_of(model), profile, shape, machine)
    return Task(profile, machine.cluster, work.batch, left, machine.system, machine.coefficients)


def measure(num_devices: int, options: Options, rounds: int, work: Workload) -> None:
    """Prints a line for each plan, fastest first, and how far the choice is from the best."""
    enable(options)
    ranking = search(task_of(options, work))
    predicted = {one.plan: one.step.total_s for one in ranking.candidates if one.step is not None}
    measured = {plan: Measured(float("inf"), float("inf")) for plan in predicted}
    for number in range(rounds):
        for plan in list(measured) if number % 2 == 0 else list(reversed(measured)):
            measured[plan] = measured[plan].least(step_of(plan, options, work))
    for plan, found in sorted(measured.items(), key=lambda one: one[1].seconds):
        print(
            f"{found.seconds * 1000:8.1f} ms {found.processor_s * 1000:8.1f} ms of processors "
            f"{predicted[plan] * 1000:8.1f} ms predicted  {plan}",
            flush=True,
        )
    chosen = measured[ranking.best.plan]
    by_clock = chosen.seconds / min(one.seconds for one in measured.values())
    by_processor = chosen.processor_s / min(one.processor_s for one in measured.values())
    print(
        f"{num_devices} workers, {len(measured)} plans: {ranking.best.plan} is x{by_clock:.3f} of the best, "
        f"x{by_processor:.3f} by processors",
        flush=True,
    )
    device.disable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 8")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--mixed-precision", action="store_true")
    arguments = parser.parse_args()
    config = LlamaConfig(
        vocab_size=2048, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    work = Workload(config, arguments.batch, arguments.length)
    for num_devices in arguments.devices:
        options = Options(devices=num_devices, mixed_precision=arguments.mixed_precision)
        measure(num_devices, options, arguments.rounds, work)


if __name__ == "__main__":
    main()
