"""Compares the memory that the planner predicts with what the runtime allocates, without devices.

    python scripts/check_memory.py                                   # the plans of docs/planner.md
    python scripts/check_memory.py --model Llama2-13B --plan shard=16,precision=bf16
    python scripts/check_memory.py --json

Each case runs in a process of its own: the model is on fake tensors, which have shapes and no numbers, the process
group is PyTorch's fake one, whose collectives return at once, and the plan is applied by `parallelizer.apply`, as in a
worker.
Two steps of AdamW run under `torch.distributed._tools.mem_tracker.MemTracker`; the peak of the second counts, when the
optimizer's state is there. Decides nothing about plans: it only looks.

What differs from a worker on a GPU, and why:

- Tensors say that they are on the CPU, where FSDP2 needs no streams. What it allocates is the same. On a GPU the
  allocator may hold more; that is not looked at here.
- The optimizer is told `foreach=True`, its default on GPUs, and steps on the local parts, since the tracker takes the
  whole shapes that DTensor computes with for memory.
- With `offload=all`, host memory is a device of its own: its tensors say that they are on "cuda", where nothing runs,
  and FSDP2's copies between host and device go from one to the other.
- Targets are not checked against the vocabulary and positions not for packed rows: both would read a number.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

GIB = 2**30
_HOST = "cuda"
CASES = (
    ("Llama2-7B", "shard=8,precision=bf16", 0),
    ("Llama2-7B", "replicate=8,precision=bf16", 0),
    ("Llama2-7B", "replicate=2,shard=4,precision=bf16", 0),
    ("Llama2-7B", "shard=64,precision=bf16", 0),
    ("Llama2-7B", "shard=8", 0),
    ("Llama2-7B", "replicate=8", 0),
    ("Llama2-7B", "shard=8,precision=bf16,recompute=full", 0),
    ("Llama2-7B", "shard=64,precision=bf16,recompute=full", 0),
    ("Llama2-7B", "shard=8,precision=bf16,recompute=selective", 0),
    ("Llama2-7B", "shard=8,precision=bf16,recompute=16", 0),
    ("Llama2-7B", "shard=8,micro_batches=4,precision=bf16", 0),
    ("Llama2-7B", "tensor=8,precision=bf16", 0),
    ("Llama2-7B", "tensor=8,sequence_parallel=true,precision=bf16", 0),
    ("Llama2-7B", "shard=2,tensor=8,sequence_parallel=true,precision=bf16", 0),
    ("Llama2-7B", "shard=8,tensor=4,sequence_parallel=true,precision=bf16", 0),
    ("Llama2-7B", "shard=8,tensor=4,sequence_parallel=true,recompute=selective,precision=bf16", 0),
    ("Llama2-7B", "shard=8,tensor=4,sequence_parallel=true,recompute=full,precision=bf16", 0),
    ("Llama2-7B", "pipeline=8,micro_batches=16", 0),
    ("Llama2-7B", "pipeline=8,micro_batches=16", 7),
    ("Llama2-7B", "shard=2,pipeline=4,micro_batches=8,precision=bf16", 0),
    ("Llama2-7B", "shard=2,pipeline=4,micro_batches=8,precision=bf16", 7),
    ("Llama2-7B", "pipeline=4,micro_batches=8,schedule=gpipe,precision=bf16,replicate=2", 0),
    ("Llama2-7B", "tensor=2,pipeline=4,micro_batches=8,precision=bf16", 0),
    ("Llama2-13B", "shard=16,precision=bf16", 0),
    ("Llama2-13B", "shard=64,precision=bf16", 0),
    ("Llama2-13B", "replicate=2,shard=8,precision=bf16", 0),
    ("Llama2-13B", "shard=8,tensor=8,sequence_parallel=true,precision=bf16", 0),
    ("Llama2-13B", "tensor=8,precision=bf16", 0),
    ("Llama2-13B", "shard=16,precision=bf16,recompute=full", 0),
    ("Llama2-13B", "shard=4,tensor=2,pipeline=2,micro_batches=4,precision=bf16", 0),
)
"""Model, plan and rank of the table in docs/planner.md."""


@dataclass(frozen=True)
class Case:
    """One rank of one plan, tracked and predicted.

    Attributes:
        model: Name of the model, one of `planner/profiles/known_models.json`.
        plan: The plan.
        rank: The rank that was looked at.
        tracked_bytes: Most bytes at a time in the second step.
        host_bytes: Most bytes in host memory at a time, with `offload=all`.
        predicted_bytes: What `estimate_memory` says is allocated there.
        forward_bytes: Most bytes in the forward, and so on. Where forward waits for backward, it is in the backward.
        backward_bytes: Most bytes in the backward.
        step_bytes: Most bytes in the optimizer's step.
        problem: Why it could not be tracked.
    """

    model: str
    plan: str
    rank: int
    tracked_bytes: float = 0.0
    predicted_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    step_bytes: float = 0.0
    host_bytes: float = 0.0
    problem: str = ""

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted_bytes / self.tracked_bytes - 1.0


def track(
    name: str,
    text: str,
    rank: int,
    rows: int,
    length: int,
    num_layers: int | None,
    adapter_rank: int = 0,
    *,
    own_loss: bool = False,
) -> Case:
    """Returns one case, looked at in this process, which has no process group yet.

    Args:
        name: Name of the model.
        text: The plan.
        rank: The rank to look at.
        rows: Rows of a micro-batch.
        length: Positions of a row.
        num_layers: Number of blocks, instead of the model's.
        adapter_rank: Rank of the adapters that are trained instead of the weights, of all linear layers of blocks.
        own_loss: Whether the loss is computed from the logits as for a script that does so, instead of in the forward.
    """
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

    from moreh_ap.parallelizer.apply import Example, apply_plan
    from moreh_ap.parallelizer.call.call import Call
    from moreh_ap.parallelizer.call.way_to_execute import way_to_execute
    from moreh_ap.parallelizer.data.fsdp import prepare, settle
    from moreh_ap.parallelizer.loss import chunked_cross_entropy
    from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
    from moreh_ap.parallelizer.mesh import build_mesh
    from moreh_ap.parallelizer.state import loading
    from moreh_ap.parallelizer.state.loading import _allocate, _names_by_tensor, local_shard
    from moreh_ap.parallelizer.tensor import vocabulary
    from moreh_ap.patching import Patches
    from moreh_ap.plan import Plan
    from moreh_ap.planner.cost.memory_footprint import estimate_memory
    from moreh_ap.planner.cost.training_systems import MOREH_AP
    from moreh_ap.planner.profiles.adapters import FROZEN_WEIGHTS, adapters_of, with_adapters
    from moreh_ap.planner.profiles.known_models import find_model
    from moreh_ap.planner.profiles.transformer_shape import from_config, profile_of

    plan, cpu = Plan.parse(text), torch.device("cpu")
    numbers = {**find_model(name).config, **({} if num_layers is None else {"num_hidden_layers": num_layers})}
    config = AutoConfig.for_model(**numbers, attn_implementation="sdpa", use_cache=False)
    dist.init_process_group("fake", rank=rank, world_size=plan.num_devices, store=FakeStore())
    with torch.device("meta"):
        module, meta = (AutoModelForCausalLM.from_config(config).train() for _ in range(2))
        if adapter_rank:
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(task_type="CAUSAL_LM", r=adapter_rank, target_modules="all-linear")
            module, meta = (get_peft_model(one, adapters) for one in (module, meta))
    local_rows = rows * plan.micro_batches
    batch: dict[str, Any] = {
        "input_ids": torch.zeros(local_rows, length, dtype=torch.long),
        "labels": torch.zeros(local_rows, length, dtype=torch.long),
        "use_cache": False,
    }
    if own_loss:
        del batch["labels"]
        chunked_cross_entropy.CHUNK_ELEMENTS["cpu"] = chunked_cross_entropy.CHUNK_ELEMENTS["cuda"]
    chunked_cross_entropy.install(Patches())
    chunked_cross_entropy.use_for(module)
    applied = apply_plan(module, plan, build_mesh(plan, "cpu"), cpu, Example(meta, (), batch))
    position = applied.position
    peaks = (0.0, 0.0, 0.0)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
        mock.patch.object(vocabulary, "check_targets"),
        mock.patch.object(chunked_cross_entropy, "check_targets"),
        mock.patch.object(GlobalReduction, "_meet"),
        # Fake tensors leave weak references to what they are made of, and PyTorch swaps no tensor that has one.
        mock.patch.object(loading, "_allocate_in_place", lambda tensors, _device: set(map(id, tensors))),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
        mock.patch.object(loading, "HOST", torch.device(_HOST)),
        mock.patch.object(loading, "on_own_device", contextlib.nullcontext),  # "cuda" is not this worker's device here
        mock.patch.object(FSDPParamGroup, "_validate_cpu_offload_params"),
        _host_memory(),
    ):
        names = [same for same in _names_by_tensor(module) if not any(one in applied.absent for one in same)]
        _allocate(module, names, cpu)
        prepare(module)
        settle(module)
        batch = {key: fake.from_tensor(one) if key != "use_cache" else one for key, one in batch.items()}
        held = [param for key, param in module.named_parameters() if key not in applied.absent]
        trained = [param for param in held if param.requires_grad]
        parts = [torch.nn.Parameter(local_shard(param.detach())) for param in trained]
        optimizer = torch.optim.AdamW(parts, lr=1e-4, foreach=True)
        kinds = ("rows",) if own_loss else ("share", "rows")
        mode = "split" if plan.data_parallel * plan.micro_batches > 1 else "unsplit"
        call = Call(module, mode, cpu, axis=position.data, kinds=kinds)
        global_batch = plan.data_parallel * local_rows
        with _tracker(held) as tracker:
            host_bytes = 0.0
            for _ in range(2):
                run = way_to_execute(call, plan, global_batch, meta)(call, (), batch)
                if own_loss:
                    gradients = [_gradient_of_own_loss(run.outputs[0], batch["input_ids"])]
                else:
                    gradients = [torch.ones(()), *[None] * (len(run.shapes) - 1)]
                forward = tracker.take_peak()
                run.backward(gradients)
                del gradients
                settle(module)
                del run
                backward = tracker.take_peak()
                for param, part in zip(trained, parts, strict=True):
                    part.grad = None if param.grad is None else local_shard(param.grad)
                optimizer.step()
                for one in (*held, *parts):
                    one.grad = None
                host_bytes = tracker.peak_on_host()
                peaks = (forward, backward, tracker.take_peak())
    dist.destroy_process_group()
    shape, system = from_config(numbers), MOREH_AP
    profile = replace(profile_of(shape, length), loss_outside=own_loss)
    if adapter_rank:
        profile = with_adapters(profile, adapters_of(profile, shape, adapter_rank), FROZEN_WEIGHTS["fp32"])
        system = replace(system, trains_weights=False)
    predicted = estimate_memory(profile, plan, global_batch, system, position=position.pipeline.rank)
    return Case(name, text, rank, max(peaks), predicted.allocated_bytes, *peaks, host_bytes)


def _host_memory() -> Any:
    """Returns what has FSDP2's copies of gradients to host memory arrive on the device that stands for it.

    These alone say that they go to the CPU and whether they wait; there everything else is on the CPU already.
    """
    import torch

    move = torch.Tensor.to

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if args == (torch.device("cpu"),) and "non_blocking" in kwargs and tensor.device.type == "cpu":
            return torch.ops.aten._to_copy.default(tensor, device=torch.device(_HOST))
        return move(tensor, *args, **kwargs)

    return mock.patch.object(torch.Tensor, "to", to)


def _gradient_of_own_loss(logits: Any, labels: Any) -> Any:
    """Returns the gradient of what a worker holds of logits, for ``F.cross_entropy(logits.view(-1, classes), labels)``.

    The operations are those that the controller sends, on what the worker's store makes of the logits.
    """
    import torch

    from moreh_ap.parallelizer.loss.later_operations import held, run_on_later_values

    aten, target = torch.ops.aten, labels.view(-1)
    scores = held(logits.view(len(target), -1), torch.float32)
    probabilities = run_on_later_values(aten._log_softmax.default, (scores, 1, False), {})
    arguments = (probabilities, target, None, 2, -100)
    _, total = run_on_later_values(aten.nll_loss_forward.default, arguments, {})
    chosen = run_on_later_values(aten.nll_loss_backward.default, (torch.ones(()), *arguments, total), {})
    arguments = (chosen, probabilities, 1, torch.float32)
    gradient = run_on_later_values(aten._log_softmax_backward_data.default, arguments, {})
    gradient = run_on_later_values(aten.view.default, (gradient, list(logits.shape)), {})
    return gradient.values(gradient.held)


def _tracker(held: list[Any]) -> Any:
    """Returns PyTorch's tracker, without its statistics of modules: these allow a module one call a step."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor

    class Tracker(MemTracker):
        def take_peak(self) -> float:
            """Returns the most bytes at a time since the last call."""
            peak = self._peak_mem.get(torch.device("cpu"), 0)  # not what the dry runs of micro-batches have on meta
            self._peak_mem = {}
            return float(peak)

        def peak_on_host(self) -> float:
            """Returns the most bytes at a time on the device that stands for host memory, since `take_peak`."""
            return float(sum(peak for device, peak in self._peak_mem.items() if device.type == _HOST))

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(one, SplitTensor) for one in types):
                return NotImplemented  # as for DTensor: what it does with its part comes by afterwards
            return super().__torch_dispatch__(func, types, args, kwargs)

        def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
            """Nothing."""

        def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
            """Nothing."""

        def _pre_bw_hook(self, module: Any, args: Any) -> None:
            """Nothing."""

        def _post_bw_hook(self, module: Any, args: Any) -> None:
            """Nothing."""

    tracker = Tracker()
    tracker.track_external(*held)
    return tracker


def _in_own_process(model: str, plan: str, rank: int, arguments: argparse.Namespace) -> Case:
    command = [sys.executable, __file__, "--model", model, "--plan", plan, "--rank", str(rank), "--here", "--json"]
    command += ["--rows", str(arguments.rows), "--seq-len", str(arguments.seq_len)]
    command += ["--lora", str(arguments.lora), *(["--own-loss"] if arguments.own_loss else [])]
    if arguments.layers is not None:
        command += ["--layers", str(arguments.layers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["nothing was said"]
        return Case(model, plan, rank, problem=next((one for one in reversed(said) if "Error" in one), said[-1]))
    return Case(**json.loads(done.stdout.splitlines()[-1])[0])


def _print_table(cases: Iterable[Case]) -> list[Case]:
    """Prints a row as soon as it is there, and returns all."""
    print("| model | plan | rank | tracked GiB | predicted GiB | error |\n|---|---|---|---|---|---|", flush=True)
    seen = []
    for case in cases:
        seen.append(case)
        figures = f"not tracked: {case.problem} | | "
        if not case.problem:
            figures = f"{case.tracked_bytes / GIB:.2f} | {case.predicted_bytes / GIB:.2f} | {case.error:+.1%}"
        print(f"| {case.model} | `{case.plan}` | {case.rank} | {figures} |", flush=True)
    errors = [abs(case.error) for case in seen if not case.problem]
    if errors:
        print(f"\n{len(errors)} cases: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    return seen


def main() -> int:
    """Runs the cases that were asked for; exits with 1 if one could not be tracked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Llama2-7B")
    parser.add_argument("--plan", help="one plan instead of the table's")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="number of blocks, instead of the model's")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="adapters of that rank are trained instead")
    parser.add_argument("--own-loss", action="store_true", help="the script computes the loss from the logits")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process instead of one of its own")
    arguments = parser.parse_args()
    if arguments.here:
        warnings.simplefilter("ignore")
        os.environ["HF_HUB_OFFLINE"] = "1"
        one = (arguments.model, arguments.plan or "replicate=1", arguments.rank)
        cases: Iterable[Case] = [
            track(
                *one,
                arguments.rows,
                arguments.seq_len,
                arguments.layers,
                arguments.lora,
                own_loss=arguments.own_loss,
            )
        ]
    else:
        wanted = [(arguments.model, arguments.plan, arguments.rank)] if arguments.plan else list(CASES)
        cases = (_in_own_process(*one, arguments) for one in wanted)
    if arguments.json:
        seen = list(cases)
        print(json.dumps([asdict(case) for case in seen]))
    else:
        seen = _print_table(cases)
    return int(any(case.problem for case in seen))


if __name__ == "__main__":
    sys.exit(main())
