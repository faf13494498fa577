#!/usr/bin/env python
"""Tensor parallelism: every matrix product is split over the devices, which all work on the same rows.

    torchrun --standalone --nproc-per-node 2 tutorials/manual/train_tp.py --layers 6 --hidden 512 --json tp.json

In every block the first products are split by columns (heads, hidden units) and the last one by rows, so that one sum
over the devices ends each half of a block. Embedding and head are split by vocabulary; with `--loss-parallel`, the
default, the loss is computed from the split logits, which then never exist as a whole.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import (
    HEAD_SIZE,
    Clock,
    Report,
    argument_parser,
    build_model,
    count_parameters,
    make_batches,
    parse_arguments,
    save_weights,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def apply_tensor_parallel(
    model: torch.nn.Module, mesh: DeviceMesh, sequence_parallel: bool = False, loss_parallel: bool = True
) -> None:
    """Splits a Llama, or the part of one that a stage of a pipeline holds, over the devices of `mesh`.

    Args:
        model: The `LlamaForCausalLM`; an embedding or head that is not there is passed over.
        mesh: One axis.
        sequence_parallel: Between the products every device has its part of the positions (dim 1), and computes the
            norms for those alone. Otherwise the hidden states there are the same on every device.
        loss_parallel: The logits stay split by vocabulary, as a DTensor. Otherwise every device gets all of them.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if isinstance(model.model.embed_tokens, torch.nn.Embedding):
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    if isinstance(model.lm_head, torch.nn.Linear):
        plan["lm_head"] = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
    for number in range(len(model.model.layers)):
        name = f"model.layers.{number}"
        plan |= {
            # The input becomes a DTensor once and is shared by q, k and v, so that their gradients of it are added
            # before they are summed over the devices: one sum instead of three.
            f"{name}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            f"{name}.self_attn.q_proj": ColwiseParallel(),
            f"{name}.self_attn.k_proj": ColwiseParallel(),
            f"{name}.self_attn.v_proj": ColwiseParallel(),
            f"{name}.self_attn.o_proj": RowwiseParallel(output_layouts=between),
            f"{name}.mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
            f"{name}.mlp.gate_proj": ColwiseParallel(),
            f"{name}.mlp.up_proj": ColwiseParallel(),
            f"{name}.mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        if sequence_parallel:
            plan[f"{name}.input_layernorm"] = SequenceParallel(use_local_output=True)
            plan[f"{name}.post_attention_layernorm"] = SequenceParallel(use_local_output=True)
    if sequence_parallel:
        # The embeddings leave their module whole, since transformers reads positions and mask off their shape.
        plan["model.layers.0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
        plan["model.norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, plan)


def parameter_groups(model: torch.nn.Module) -> list[dict]:
    """Returns the parameters for an optimizer: one call of a fused kernel takes those of one mesh, or whole ones."""
    groups = defaultdict(list)
    for parameter in model.parameters():
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return [{"params": group} for group in groups.values()]


def clip_grad_norm(model: torch.nn.Module, max_norm: float, pipeline: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Scales the gradients so that the norm of all of them is at most `max_norm`; returns what it was before.

    `torch.nn.utils.clip_grad_norm_` takes neither parameters of several meshes, nor split and whole ones together. So
    the norm of each group is taken, and the squares are added.

    Args:
        model: With gradients.
        max_norm: Of the whole gradient.
        pipeline: Processes that hold the other stages of the model, whose squares belong to the norm too.
    """
    groups = [group["params"] for group in parameter_groups(model)]
    norms = [torch.nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in groups]
    squares = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).square().sum()
    if pipeline is not None:
        dist.all_reduce(squares, group=pipeline)
    total = squares.sqrt()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict with split tensors put together again; all devices that hold parts have to call it."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def check_divisible(parser: argparse.ArgumentParser, args: argparse.Namespace, tensor: int) -> None:
    """Ends the program if heads, vocabulary or positions cannot be split evenly over `tensor` devices."""
    heads = args.hidden // HEAD_SIZE
    for name, size in (("--hidden / 64", heads), ("--vocabulary", args.vocabulary), ("--block-size", args.block_size)):
        if size % tensor:
            parser.error(f"{name} is {size}; it must be a multiple of the {tensor} devices that split it")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--sequence-parallel", action="store_true", help="split the positions between the products")
    parser.add_argument("--loss-parallel", action=argparse.BooleanOptionalAction, default=True)
    args = parse_arguments(parser, torchrun=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_divisible(parser, args, world_size)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("tensor",))

    model = build_model(args).to(device)
    report = Report(count_parameters(model))
    apply_tensor_parallel(model, mesh, args.sequence_parallel, args.loss_parallel)
    optim = torch.optim.AdamW(parameter_groups(model), lr=args.lr, eps=args.epsilon, fused=True)

    clock = Clock(report, prints=rank == 0)
    for batch in make_batches(args):
        rows = batch.to(device, non_blocking=True)  # all rows, on every device
        losses = []
        for input_ids in rows.chunk(args.micro_batches):
            with loss_parallel() if args.loss_parallel else nullcontext():  # around the backward too
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
                    loss = model(input_ids, labels=input_ids).loss / args.micro_batches
                loss.backward()
            losses.append(loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach())
        norm = clip_grad_norm(model, args.max_norm)
        optim.step()
        optim.zero_grad(set_to_none=True)
        # Every device has computed the loss of the whole batch: nothing is to be summed over them.
        clock.step_ended(torch.stack(losses).sum(), norm)

    if rank == 0:
        report.write(args.json)
    if args.save:
        whole = whole_state(model)
        save_weights(whole, args.save if rank == 0 else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
