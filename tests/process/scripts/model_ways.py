"""Every way in which scripts make a model and move it, each trained for three steps beside the same on the CPU."""

import copy

import neighbour  # a module beside this script
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig


class Mixer(nn.Module):
    """A class of the script itself, with a helper of the script and a constant of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), neighbour.Gate(8), nn.Linear(8, 3)])

    def forward(self, x):
        for layer in self.layers:
            x = activate(layer(x)) * SCALE
        return x


SCALE = 0.5


def activate(x):
    return torch.tanh(x)


CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def train(name, model, optimizer, reference):
    """Trains `model` on the accelerator and its copy on the CPU; both must give the same."""
    slow = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        if hasattr(model, "config"):
            ids = torch.randint(0, 64, (5, 7), generator=generator)
            found, expected = model(ids.cuda(), labels=ids.cuda())[0], reference(ids, labels=ids)[0]
        else:
            x = torch.randn(5, 8, generator=generator)
            found, expected = model(x.cuda()).square().mean(), reference(x).square().mean()
        for loss, stepper in ((found, optimizer), (expected, slow)):
            stepper.zero_grad()
            loss.backward()
            stepper.step()
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)
    for found, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-6)
    print(name, "as on the CPU", flush=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


torch.manual_seed(0)
early, early_reference = [copy.deepcopy(model) for model in [Mixer()] for _ in range(2)]
early_optimizer = sgd(early)

torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)
print("devices", torch.cuda.device_count(), torch.cuda.get_device_name(), flush=True)

train("made before the line", early.cuda(), early_optimizer, early_reference)

model = Mixer()
optimizer = sgd(model)
reference = copy.deepcopy(model)
train("optimizer made before the move", model.cuda(), optimizer, reference)

model = Mixer().to(torch.device("cuda", 0))
train("moved with .to", model, sgd(model), copy.deepcopy(model).cpu())

with torch.device("cuda"):
    model = Mixer()
train("built on the device", model, sgd(model), copy.deepcopy(model).to("cpu"))

model = nn.Sequential(nn.Linear(8, 8, device="cuda"), neighbour.Gate(8).cuda())
train("parts moved one by one", model, sgd(model), copy.deepcopy(model).cpu())

model = AutoModelForCausalLM.from_config(CONFIG)
reference = copy.deepcopy(model)
train("from a config", model.to("cuda"), sgd(model), reference)

with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(CONFIG)
train("from a config on the device", model, sgd(model), copy.deepcopy(model).cpu())

model.to("cpu")
reference = copy.deepcopy(model)
train("moved back and there again", model.to(device="cuda"), sgd(model), reference)

torch.save(model.state_dict(), "model.pt")
loaded = AutoModelForCausalLM.from_config(CONFIG)
loaded.load_state_dict(torch.load("model.pt", map_location="cuda"))
reference = copy.deepcopy(loaded)
train("loaded from a state dict", loaded.cuda(), sgd(loaded), reference)
