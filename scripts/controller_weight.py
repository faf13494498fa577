#!/usr/bin/env python
"""Counts what one training step costs the script's own process: Python calls of the package, and CPU time.

    python scripts/controller_weight.py --layers 2 16 --workers 2     # two Llamas, of 21 and of 147 parameter tensors
    python scripts/controller_weight.py --layers 16 --functions 20    # which functions are called most

`scripts/bench_overhead.py --controller` prints the table for several sizes and numbers of workers. A step is call,
backward, `clip_grad_norm_`, AdamW, `zero_grad`, and the loss read, then `torch.cuda.synchronize()`, so that all answers
of the workers are taken in. Calls are those of functions of the package in all Python threads of the process; of each
function the lowest number over a few steps, since how often a thread looks for an answer depends on when it arrives.
CPU time is that of the whole process, the engine's threads among them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from call_counter import CallCounter, Function

WARM_UP_STEPS = 12  # the first ones build the optimizer's state, and the sixth is compared with its prediction
COUNTED_STEPS = 6
TIMED_STEPS = 20
META_STEPS = 5  # of PyTorch on meta, which takes seconds for a hundred layers
ROWS, TOKENS = 8, 16


@dataclass(frozen=True)
class Weight:
    """What a step costs the controller.

    Attributes:
        parameters: Parameter tensors of the model.
        workers: Number of workers.
        with_cache: Whether the model returns a key-value cache.
        calls: Python calls of the package in one step.
        cpu_ms: Median CPU time of a step in the script's process, without counting.
        meta_cpu_ms: Median CPU time of the same step of PyTorch with the parameters on meta.
        functions: Calls by function, most called first: module, name, calls.
    """

    parameters: int
    workers: int
    with_cache: bool
    calls: int
    cpu_ms: float
    meta_cpu_ms: float
    functions: list[tuple[str, str, int]]


def build(layers: int, with_cache: bool) -> torch.nn.Module:
    """Returns a small Llama of 9 parameter tensors a layer, and 3 around them.

    Args:
        layers: Number of layers.
        with_cache: Whether it returns a key-value cache, two tensors a layer, as models of transformers do unless told.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
                         num_attention_heads=2, num_key_value_heads=2, use_cache=with_cache)  # fmt: skip
    return LlamaForCausalLM(config)


def step_of(model: torch.nn.Module, device: str) -> Callable[[], object]:
    """Returns a training step of `model` on `device`; on meta, where there is no number, the loss is not read."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(0, 64, (ROWS, TOKENS))

    def step() -> object:
        ids = rows.to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return None if device == "meta" else loss.item()

    return step


def cpu_ms_of(step: Callable[[], object], steps: int) -> float:
    """Returns the median CPU time of a step in this process."""
    times_ms = []
    for _ in range(steps):
        begun_s = time.process_time()
        step()
        times_ms.append((time.process_time() - begun_s) * 1e3)
    return statistics.median(times_ms)


def fewest_calls(counter: CallCounter, step: Callable[[], object]) -> dict[Function, int]:
    """Returns the lowest number of calls in a few steps, by function; no finalizer runs meanwhile."""
    gc.collect()
    gc.disable()
    try:
        counted = [counter.count(step) for _ in range(COUNTED_STEPS)]
    finally:
        gc.enable()
    functions = set().union(*counted)
    return {function: min(calls[function] for calls in counted) for function in functions}


def measure(layers: int, workers: int, with_cache: bool, counter: CallCounter) -> Weight:
    """Returns the weight of a step; the accelerator has been enabled by then."""
    # Without a cache transformers looks at positions, and there are none on meta.
    meta_step = step_of(build(layers, with_cache=True).to("meta"), "meta")
    model = build(layers, with_cache).cuda()
    step = step_of(model, "cuda")

    def whole_step() -> None:
        step()
        torch.cuda.synchronize()

    meta_step()
    for _ in range(WARM_UP_STEPS):
        whole_step()
    cpu_ms = cpu_ms_of(whole_step, TIMED_STEPS)
    calls = fewest_calls(counter, whole_step)
    functions = sorted(((*function, number) for function, number in calls.items() if number), key=lambda row: -row[2])
    return Weight(len(list(model.parameters())), workers, with_cache, sum(calls.values()), cpu_ms,
                  cpu_ms_of(meta_step, META_STEPS), functions)  # fmt: skip


def main() -> int:
    """Runs the command line; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 16], help="sizes, one model after the other")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", choices=("no", "yes"), nargs="+", default=["no"],
                        help="whether the models return a key-value cache, two tensors a layer")  # fmt: skip
    parser.add_argument("--functions", type=int, default=0, help="how many of the most called functions to print")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()

    counter = CallCounter()
    threading.setprofile(counter)  # for the threads that the accelerator starts
    torch.moreh.option.enable_advanced_parallelization(plan=f"replicate={args.workers}", mixed_precision=False)
    weights = [measure(layers, args.workers, cache == "yes", counter) for cache in args.cache for layers in args.layers]
    for weight in weights:
        parameters = f"{weight.parameters} parameters{', a cache' if weight.with_cache else ''}"
        print(f"{parameters}, {weight.workers} workers: {weight.calls} calls, {weight.cpu_ms:.1f} ms of CPU; "
              f"PyTorch on meta {weight.meta_cpu_ms:.1f} ms")  # fmt: skip
        for module, name, calls in weight.functions[: args.functions]:
            print(f"{calls:6} {module} {name}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(weight) for weight in weights], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
