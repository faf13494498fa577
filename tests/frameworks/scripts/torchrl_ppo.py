"""PPO with TorchRL: actor and critic as TensorDict modules, GAE, the clipped loss, a replay buffer of made-up rollouts.

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
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss
from torchrl.objectives.value import GAE

OBSERVED, ACTIONS, STEPS = 6, 2, 32


def rollout(actor, device):
    """A made-up trajectory, with actions drawn by the actor."""
    observations = torch.randn(STEPS + 1, OBSERVED)
    data = TensorDict({"observation": observations[:-1].to(device)}, [STEPS])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):  # as collectors do
        actor(data)
    done = torch.zeros(STEPS, 1, dtype=torch.bool)
    done[-1] = True
    following = {
        "observation": observations[1:],
        "reward": observations[1:, :1].clone(),
        "done": done,
        "terminated": done.clone(),
    }
    data["next"] = TensorDict(following, [STEPS]).to(device)
    return data


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
    critic = ValueOperator(
        nn.Sequential(nn.Linear(OBSERVED, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"]
    ).to(device)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_bonus=False)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
    for _ in range(2):
        data = rollout(actor, device)
        for _ in range(2):
            advantage(data)
            for rows in data.reshape(-1).split(16):
                losses = loss_module(rows)
                loss = losses["loss_objective"] + losses["loss_critic"]
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                print(f"loss {loss.item():.6f}")

    values = nn.Sequential(nn.Linear(OBSERVED, 16), nn.ReLU(), nn.Linear(16, 3))
    from torchrl.modules import QValueActor

    policy = QValueActor(values, in_keys=["observation"], action_space="categorical").to(device)
    dqn = DQNLoss(policy, action_space="categorical", delay_value=True)
    dqn.make_value_estimator(gamma=0.9)
    optimizer = torch.optim.Adam(dqn.parameters(), lr=1e-2)
    for _ in range(3):
        data = rollout(actor, device).select("observation", "next")
        data["action"] = torch.randint(0, 3, (STEPS,)).to(device)
        loss = dqn(data)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"DQN: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
