"""Measures every plan that the search looks at for a small model, and where the planner's choice stands among them.

    python scripts/bench_planner.py --devices 2 4 --rounds 2

The model is a Llama of six layers on CPU workers, float32 unless --mixed-precision. Every plan trains a model of its
own in the same process and on the same workers; rounds go through the plans in turn, forwards and backwards, so that
a busy neighbour hits none of them alone. A plan's time is the least of its rounds' medians.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moreh_ap import device
from moreh_ap.option import Options
from moreh_ap.plan import Plan
from moreh_ap.planner.ranking import Task
from moreh_ap.planner.search import search
from moreh_ap.session.first_use import family_of
from moreh_ap.session.machine import machine_of
from moreh_ap.session.planning import constraints_of
from moreh_ap.session.profiling import profile_model, shape_of

CONFIG = LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=4,
)  # fmt: skip
BATCH, LENGTH = 8, 128
STEPS = 6


def seconds_of(plan: Plan, options: Options) -> float:
    """Returns the median time of a step of a new model under a plan; the first step is left out."""
    current = device.current()
    assert current is not None
    current.options = current.session.options = replace(options, plan=plan)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        model = LlamaForCausalLM(CONFIG).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(0, CONFIG.vocab_size, (BATCH, LENGTH)).cuda()
        found = []
        for _ in range(STEPS):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - started_s)
        current.session.watch = None
        model.cpu()
    return statistics.median(found[1:])


def measure(num_devices: int, options: Options, rounds: int) -> None:
    """Prints a line for each plan, fastest first, and how far the choice is from the best."""
    device.enable(options)
    current = device.current()
    assert current is not None
    model = LlamaForCausalLM(CONFIG)
    machine, shape = machine_of(current.session), shape_of(model)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    profile = profile_model(model, shape, ((), {"input_ids": ids}))
    left = constraints_of(options, family_of(model), profile, shape, machine)
    task = Task(profile, machine.cluster, BATCH, left, machine.practice, machine.coefficients)
    ranking = search(task)
    predicted = {one.plan: one.step.total_s for one in ranking.candidates if one.step is not None}
    measured = {plan: float("inf") for plan in predicted}
    for number in range(rounds):
        for plan in list(measured) if number % 2 == 0 else list(reversed(measured)):
            measured[plan] = min(measured[plan], seconds_of(plan, options))
    best = min(measured.values())
    for plan in sorted(measured, key=lambda one: measured[one]):
        print(f"{measured[plan] * 1000:8.1f} ms  {predicted[plan] * 1000:8.1f} ms predicted  {plan}")
    chosen = ranking.best.plan
    print(f"{num_devices} workers, {len(measured)} plans: {chosen} is x{measured[chosen] / best:.3f} of the best")
    device.disable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mixed-precision", action="store_true")
    arguments = parser.parse_args()
    for num_devices in arguments.devices:
        options = Options(devices=num_devices, mixed_precision=arguments.mixed_precision)
        measure(num_devices, options, arguments.rounds)


if __name__ == "__main__":
    main()
