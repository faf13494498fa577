"""Enables, trains, disables, and compares every attribute of PyTorch and transformers with what was there.

Compared are the attributes of all modules that were imported before the line, of the classes in them, and the entries
of tables (dicts, lists, sets) among these.
"""

import io
import sys
import threading
import warnings
from types import ModuleType

import torch
import torch._dynamo.eval_frame as compiler
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from moreh_ap import device

LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "threading", "multiprocessing", "copyreg")

# What PyTorch, pickle and threads note and count while they work, with the one line or without it.
WORK = {
    "threading._active",  # the threads that run
    "threading._shutdown_locks",  # those for which Python waits before it ends, until it looks which have ended
    "torch._dynamo.eval_frame.cached_backends",  # those that `torch.compile` was called with
    "torch._dynamo.mutation_guard.GenerationTracker.generation",  # a counter
    "torch.jit._builtins._builtin_table",  # operators that were looked up
    "torch._opaque_base._FakeScriptObject_cls",  # imported when first needed
    "torch.utils.hooks.RemovableHandle.next_id",  # a counter
    "transformers.models.llama.configuration_llama.LlamaConfig.__slotnames__",  # pickle's, of a class
}
# Names of a change under which the registry does not have it.
OTHER_NAMES = {
    "multiprocessing.reduction.ForkingPickler._copyreg_dispatch_table": "copyreg.dispatch_table",
    "torch._dynamo.eval_frame._stance": "torch.compiler.set_stance",
    "torch.distributed.checkpoint._state_dict_stager.dispatch_table": "copyreg.dispatch_table",
    "torch.export.dynamic_shapes.SUPPORTED_NODES": "torch.utils._pytree.SUPPORTED_NODES",
    "torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE": "torch.utils._pytree.SUPPORTED_NODES",
    "torch.utils._pytree.SUPPORTED_SERIALIZED_TYPES": "torch.utils._pytree.SUPPORTED_NODES",
}
MISSING = object()
warnings.simplefilter("ignore", FutureWarning)  # of attributes that are looked at


def holders():
    """Modules and classes by their names."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in LIBRARIES and isinstance(module, ModuleType):
            found[name] = module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__.split(".")[0] in LIBRARIES:
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def entries(value):
    """What is in a table, one level deep."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # not as a lazy one of transformers would give them
    return list(value) if type(value) in (list, set) else None


def snapshot(holders):
    return {
        name: {key: (value, entries(value)) for key, value in vars(holder).items()} for name, holder in holders.items()
    }


def same(one, other):
    """Whether two tables have the same objects in them."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(other[key] is value for key, value in one.items())
    return one is None or (len(one) == len(other) and {*map(id, one)} == {*map(id, other)})


def changed(holders, before):
    """Names of attributes that are another object now, or new, or gone."""
    names = []
    for name, now in snapshot(holders).items():
        for key in now.keys() | before[name].keys():
            (old, had), (new, has) = before[name].get(key, (MISSING, None)), now.get(key, (MISSING, None))
            if old is MISSING and (isinstance(new, ModuleType) or isinstance(holders[name], type(transformers))):
                continue  # a submodule that was imported meanwhile; a name that a module looks up when it is asked
            if old is not new or not same(had, has):
                names.append(f"{name}.{key}")
    return sorted(set(names) - WORK)


def use(place):
    """Trains a little and uses what the one line changes, on `place`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)).to(place)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4, pin_memory=place == "cuda")
    for batch in loader:
        model(batch.to(place)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(torch.load(saved(model.state_dict())))
    llama = LlamaForCausalLM(LLAMA).to(place)
    output = llama(input_ids=torch.ones(2, 4, dtype=torch.long, device=place), output_hidden_states=True)
    output.logits.sum().backward()
    llama.generate(torch.ones(1, 4, dtype=torch.long, device=place), max_new_tokens=2, do_sample=False)
    thread = threading.Thread(target=lambda: torch.ones(2, device=place) * 2)
    thread.start()
    thread.join()
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2, 2))


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


LLAMA = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, pad_token_id=0)  # fmt: skip
use("cpu")  # what PyTorch and transformers import and note at their first use is there before the line
found = holders()
before = snapshot(found)
stance = compiler._stance
available = torch.cuda.is_available()
for round in range(2):
    torch.moreh.option.enable_advanced_parallelization(devices=1 + round)
    assert compiler._stance.stance == "force_eager"
    use("cuda")
    in_force = changed(found, before)
    expected = {
        "torch.nn.modules.module.Module.__call__",
        "torch.cuda.is_available",
        "torch.serialization._load",
        "torch.optim.adamw.AdamW.step",
        "torch.utils._pytree.SUPPORTED_NODES",
        "transformers.modeling_utils.safe_open",
        "threading.Thread.start",
    }
    assert expected <= set(in_force), expected - set(in_force)
    patched = {patch.target for patch in device.current()._patches}
    device.disable()
    print("changed after disable:", changed(found, before))
    assert torch.cuda.is_available() == available
    assert compiler._stance is stance
    assert torch.overrides._len_torch_function_stack() == 0
    assert type(nn.Linear(2, 2)(torch.ones(2, 2))) is torch.Tensor
    print("not in the registry:", sorted({OTHER_NAMES.get(name, name) for name in in_force} - patched))
use("cpu")

thread = threading.Thread(target=lambda: print("in a thread:", type(torch.ones(1)).__name__))
thread.start()
thread.join()
