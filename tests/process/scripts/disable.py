"""Enables, trains, disables, and compares every patched place with what was there before."""

import sys
import threading

import torch
import torch._dynamo.eval_frame as compiler
import transformers.modeling_utils as modeling
from torch import nn

from moreh_ap import device
from moreh_ap.integrations.adamw import AdamW

HOLDERS = [
    torch,
    torch.cuda,
    torch.cuda.random,
    torch.accelerator,
    torch.Tensor,
    torch.UntypedStorage,
    torch._utils,
    torch.jit,
    torch.serialization,
    torch.autograd,
    torch.utils.data.DataLoader,
    torch.nn.utils,
    nn.Module,
    sys.modules["torch.nn.utils.clip_grad"],
    threading.Thread,
    modeling,
    modeling.PreTrainedModel,
    AdamW,
    *(cls for cls in vars(torch.optim).values() if isinstance(cls, type)),
]


def attributes():
    return [dict(vars(holder)) for holder in HOLDERS]


def changed(before):
    """Names of attributes that are another object now, or new, or gone."""
    missing = object()
    names = []
    for holder, old, new in zip(HOLDERS, before, attributes()):
        for key in old.keys() | new.keys():
            if old.get(key, missing) is not new.get(key, missing):
                names.append(f"{holder.__name__}.{key}")
    return sorted(names)


def compiled():
    return torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2, 2))


compiled()  # the compiler changes optimizers when it is first used
before = attributes()
stance = compiler._stance
available = torch.cuda.is_available()
for round in range(2):
    torch.moreh.option.enable_advanced_parallelization(devices=1 + round)
    assert compiler._stance.stance == "force_eager"
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 4).cuda()).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    in_force = changed(before)
    expected = {"Module.__call__", "torch.cuda.is_available", "torch.serialization._load", "AdamW.step"}
    assert expected <= set(in_force), in_force
    device.disable()
    print("changed after disable:", changed(before))
    assert torch.cuda.is_available() == available
    assert compiler._stance is stance
    compiled()
    assert torch.overrides._len_torch_function_stack() == 0
    assert type(nn.Linear(2, 2)(torch.ones(2, 2))) is torch.Tensor

thread = threading.Thread(target=lambda: print("in a thread:", type(torch.ones(1)).__name__))
thread.start()
thread.join()
