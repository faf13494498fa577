"""Prints what the attributes of PyTorch's modules are, so that two processes can be compared."""

import json
import sys
import threading
import types

import torch
import torch.utils.data
from torch import nn

HOLDERS = {
    "torch": torch,
    "torch.cuda": torch.cuda,
    "torch.cuda.random": torch.cuda.random,
    "Module": nn.Module,
    "Tensor": torch.Tensor,
    "clip_grad": sys.modules["torch.nn.utils.clip_grad"],
    "Thread": threading.Thread,
    "Optimizer": torch.optim.Optimizer,
    "SGD": torch.optim.SGD,
    "AdamW": torch.optim.AdamW,
    "DataLoader": torch.utils.data.DataLoader,
}
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def describe(value):
    """What can be said of a value in another process too: its type, and of a function or class where it is from."""
    if not isinstance(value, (type, *FUNCTIONS)):
        return [type(value).__qualname__]
    code = getattr(value, "__code__", None)
    return [str(value.__module__), value.__qualname__, f"{code.co_filename}:{code.co_firstlineno}" if code else ""]


found = {f"{name}.{key}": describe(value) for name, holder in HOLDERS.items() for key, value in vars(holder).items()}
found["available"] = torch.cuda.is_available()
found["modes"] = torch.overrides._len_torch_function_stack()
found["threads"] = threading.active_count()
found["tensor"] = str(torch.ones(2).to("cpu"))
print(json.dumps(found))
