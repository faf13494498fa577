"""Small models with adapters of peft, and what each process of a team does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallelizer_jobs import CPU, Runner
from torch import Tensor, nn

from moreh_ap.plan import Plan

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}

_SUMS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
"""Through which gradients go; the last is not in torch 2.11."""


def lora_llama(**settings: Any) -> nn.Module:
    """Returns a Llama with LoRA; adapters do something from the first step on."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    base = LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings}
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings))


def lora_gpt2(**settings: Any) -> nn.Module:
    """Returns a GPT-2, whose linear layers are transposed and whose output weights are tied, with LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False, **no_dropout)
    )
    settings = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False, **settings}
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings))


def batch(step: int, rows: int = 6) -> dict[str, Tensor]:
    """Returns rows of unequal length."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 96, (rows, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(4, 13, (rows, 1), generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def exchanged_gradients(rank: int, world: int, plan: str) -> dict[str, int]:
    """Returns how many elements of gradients travel in the second of two steps, and of which parameters there are."""
    counts, is_second = {"exchanged": 0}, False
    names = [name for name in _SUMS if hasattr(dist, name)]
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        def exchange(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs["input"] if "input" in kwargs else args[0] if name == "all_reduce" else args[1]
            if is_second and tensor.numel() > 64:  # fewer are losses and marks
                counts["exchanged"] += tensor.numel()
            return originals[name](*args, **kwargs)

        return exchange

    with pytest.MonkeyPatch.context() as patch:
        for name in names:  # before the plan is applied, which keeps some of them
            patch.setattr(dist, name, counting(name))
        runner = Runner(lora_llama(target_modules="all-linear").train(), Plan.parse(plan))
        for step in range(2):
            forward = runner.call(batch(step))
            is_second = step == 1
            forward.backward(runner.loss_gradient(forward))
    parameters = list(runner.model.parameters())
    found = {"trained": sum(p.numel() for p in parameters if p.requires_grad)}
    found["frozen"] = sum(p.numel() for p in parameters if not p.requires_grad)
    found["frozen with gradients"] = sum(p.grad is not None for p in parameters if not p.requires_grad)
    return {**found, **counts}


def adapters_of(rank: int, world: int, plan: str, steps: int) -> dict[str, Tensor]:
    """Returns this worker's own copy of the adapters after some steps."""
    runner = Runner(lora_llama(target_modules="all-linear").train(), Plan.parse(plan))
    optimizer = torch.optim.AdamW([p for p in runner.model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        forward = runner.call({name: value.to(CPU) for name, value in batch(step).items()})
        forward.backward(runner.loss_gradient(forward))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in runner.model.named_parameters() if p.requires_grad}
