"""What training scripts do beside training: one line for each, with the values that one device gives.

With --ap it has the one line. A line `name: value` is the same on both sides.
"""

import copy
import io
import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def show(name, value):
    if isinstance(value, torch.Tensor):
        value = value.detach().float().cpu().tolist()
    if isinstance(value, float):
        value = [value]
    flat = torch.tensor(value).flatten().tolist() if isinstance(value, list) else value
    print(f"{name}:", " ".join(f"{x:.5f}" for x in flat) if isinstance(flat, list) else flat)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.body(x))


def fresh():
    torch.manual_seed(0)
    model = Net().to(device)
    x, y = torch.randn(8, 6).to(device), torch.randint(0, 3, (8,)).to(device)
    return model, x, y


def trained(steps=2, make=torch.optim.AdamW):
    model, x, y = fresh()
    optimizer = make(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, x, y, optimizer


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y).item()


# parameters and gradients
model, x, y, optimizer = trained()
show("same device", next(model.parameters()).device == x.device)
show("count", sum(p.numel() for p in model.parameters() if p.requires_grad))
show("gradient norms", [p.grad.norm().item() for p in model.parameters()])
show("total norm", torch.stack([p.grad.detach().norm(2) for p in model.parameters()]).norm(2).item())
with torch.no_grad():
    for p in model.parameters():
        p.mul_(0.9).add_(0.01)
    model.head.weight[0] = 0.5
    model.head.bias.data.clamp_(-0.1, 0.1)
    nn.init.constant_(model.body[0].bias, 0.25)
show("edited in place", loss_of(model, x, y))
for p in model.body.parameters():
    p.requires_grad_(False)
model.zero_grad()
F.cross_entropy(model(x), y).backward()
show("frozen", [p.grad is None for p in model.parameters()])
show("frozen gradients", model.head.weight.grad)
model.requires_grad_(True)
model.train(False)
show("clip_grad_value_", 0 if nn.utils.clip_grad_value_(model.parameters(), 0.01) is None else 1)
show("clipped", model.head.weight.grad)
show("vector", nn.utils.parameters_to_vector(model.parameters()).sum().item())

# copies, EMA, tied weights
model, x, y, optimizer = trained()
ema = copy.deepcopy(model).requires_grad_(False)
averaged = torch.optim.swa_utils.AveragedModel(model)
for _ in range(2):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for kept, p in zip(ema.parameters(), model.parameters()):
            kept.mul_(0.9).add_(p, alpha=0.1)
    averaged.update_parameters(model)
show("ema", loss_of(ema, x, y))
show("averaged", loss_of(averaged, x, y))
model.body[2].weight = model.body[2].weight
tied = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device)
tied[2].weight = tied[0].weight
tied(x).square().mean().backward()
show("tied", tied[0].weight.grad)

# hooks
seen = []
handle = model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
show("forward pre-hook", loss_of(model, x, y))
handle.remove()
show("without hook", loss_of(model, x, y))
out = model(x)
out.register_hook(lambda grad: grad * 2)
model.zero_grad()
F.cross_entropy(out, y).backward()
show("hook on output", model.head.bias.grad)

# dtype, saving, loading
model, x, y, optimizer = trained()
half = copy.deepcopy(model).bfloat16()
show("dtype", next(half.parameters()).dtype)
show("double", copy.deepcopy(model).double()(x.double()).sum().item())
with tempfile.TemporaryDirectory() as folder:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": torch.ones(1)}, f"{folder}/a")
    loaded = torch.load(f"{folder}/a", map_location=device)
    torch.save(model, f"{folder}/b")
    again = torch.load(f"{folder}/b", map_location=device, weights_only=False)
    from safetensors.torch import load_file, save_file, save_model

    save_file(model.state_dict(), f"{folder}/c")
    save_model(model, f"{folder}/d")
    read = load_file(f"{folder}/c", device=str(device))
show("whole model", loss_of(again, x, y))
other, _, _ = fresh()
show("keys", str(other.load_state_dict(loaded["model"])))
show("loaded", loss_of(other, x, y))
other.load_state_dict(read)
show("safetensors", loss_of(other, x, y))
buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
buffer.seek(0)
other.load_state_dict(torch.load(buffer, weights_only=True))
second = torch.optim.AdamW(other.parameters(), lr=1e-2)
second.load_state_dict(loaded["optimizer"])
F.cross_entropy(other(x), y).backward()
second.step()
show("resumed", loss_of(other, x, y))
show("state", len(second.state_dict()["state"]))

# whole-batch losses, several heads, distillation
features = F.normalize(model.body(x), dim=-1)
logits = features @ features.t() / 0.1
show("contrastive", F.cross_entropy(logits, torch.arange(8, device=device)).item())
teacher = copy.deepcopy(model).eval()
student, _, _ = fresh()
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for _ in range(3):
    with torch.no_grad():
        target = teacher(x)
    out = student(x)
    loss = F.kl_div(F.log_softmax(out / 2, -1), F.softmax(target / 2, -1), reduction="batchmean") * 4
    loss = loss + F.cross_entropy(out, y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show("distilled", loss.item())
for name, scheduler in {
    "one cycle": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
    "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}.items():
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(student(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(*([loss.item()] if name == "plateau" else []))
    show(name, [loss.item(), optimizer.param_groups[0]["lr"]])

# torch.cuda and friends
with torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=False):
    show("autocast off", loss_of(model, x, y))
scaler = torch.amp.GradScaler(device.type)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.zero_grad()
scaler.scale(F.cross_entropy(model(x), y)).backward()
scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
show("scaled step", loss_of(model, x, y))
if device.type == "cuda":
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        model(x)
        x.record_stream(torch.cuda.current_stream())
    end.record()
    torch.cuda.current_stream().synchronize()
    assert 0 < start.elapsed_time(end) < 60_000
    assert "allocated" in torch.cuda.memory_summary()
    for wrong, kind, text in (
        (lambda: x + torch.ones(8, 6), RuntimeError, "same device"),
        (lambda: x.numpy(), TypeError, "Tensor.cpu()"),
        (lambda: torch.cuda.CUDAGraph(), RuntimeError, "CUDA graphs"),
        (lambda: torch.ones(1, device="cuda:1"), RuntimeError, "one device"),
    ):
        try:
            wrong()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
show("quantile", torch.quantile(x, 0.3).item() + x.new_tensor([1.0, 2.0]).sum().item())
padded = nn.utils.rnn.pad_sequence([x[0], x[1, :2]], batch_first=True)
show("padded", (padded * torch.ones(6, device=device)).sum(1))
compiled = torch.compile(model, backend="eager")
show("compiled", loss_of(compiled, x, y))
show("compiled keys", next(iter(compiled.state_dict())))
add = torch.compile(lambda a, b: (a + b).relu(), backend="eager")
show("compiled function", add(x, x).sum().item())
model.compile(backend="eager")
show("compiled in place", loss_of(model, x, y))
torch.set_default_device(device)
show("default device", torch.zeros(2).device == x.device)
model.eval()
with torch.inference_mode():
    probabilities = model(x).softmax(-1)
    top = probabilities.topk(2)
show("top", top.values)
show("classes", top.indices)
one_hot = F.one_hot(y, 3)
confusion = torch.zeros(3, 3, dtype=torch.long, device=device)
for t, p in zip(y.view(-1), model(x).argmax(1).view(-1)):
    confusion[t.long(), p.long()] += 1
show("confusion", confusion)
show("where", torch.where(x > 0, x, -x)[:2])
show("indexing", x[y == 1].sum().item() + x[:, ::2].mean().item())
show("argmax", int(model(x).argmax()))
show("item", float(sum(model(x)[i].max() for i in range(3))))
show("loss over the list", torch.stack([F.mse_loss(model(x), one_hot.float()) for _ in range(2)]).mean().item())
for optimizer_class in (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
    model, x, y, _ = trained(3, optimizer_class)
    show(optimizer_class.__name__, loss_of(model, x, y))
