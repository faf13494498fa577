"""SAC with TorchRL: two stacked value networks with targets that follow them, on made-up transitions.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

OBSERVED, ACTIONS, ROWS = 6, 2, 32


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBSERVED + ACTIONS, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, observation, action):
        return self.net(torch.cat([observation, action], -1))


def transitions(device):
    observations = torch.randn(ROWS + 1, OBSERVED)
    done = torch.zeros(ROWS, 1, dtype=torch.bool)
    done[-1] = True
    following = {
        "observation": observations[1:],
        "reward": observations[1:, :1].clone(),
        "done": done,
        "terminated": done.clone(),
    }
    actions = torch.rand(ROWS, ACTIONS) * 1.8 - 0.9
    data = {"observation": observations[:-1], "action": actions, "next": TensorDict(following, [ROWS])}
    return TensorDict(data, [ROWS]).to(device)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(OBSERVED, 32), nn.Tanh(), nn.Linear(32, 2 * ACTIONS), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    ).to(device)
    value = ValueOperator(Value(), in_keys=["observation", "action"]).to(device)
    loss_module = SACLoss(actor, value, num_qvalue_nets=2, target_entropy=-2.0)
    loss_module.make_value_estimator(gamma=0.99)
    loss_module = loss_module.to(device)
    update_targets = SoftUpdate(loss_module, eps=0.99)
    optimizers = [
        torch.optim.Adam(list(loss_module.actor_network_params.flatten_keys().values()), lr=3e-3),
        torch.optim.Adam(list(loss_module.qvalue_network_params.flatten_keys().values()), lr=3e-3),
        torch.optim.Adam([loss_module.log_alpha], lr=3e-3),
    ]
    for _ in range(5):
        losses = loss_module(transitions(device))
        loss = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        update_targets.step()
        names = ("loss_actor", "loss_qvalue", "loss_alpha", "alpha")
        print(f"loss {loss.item():.6f}", *(f"{name} {losses[name].item():.6f}" for name in names))


if __name__ == "__main__":
    main()
