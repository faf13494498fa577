"""Reinforcement learning from scratch: DQN with a replay memory and a target network, PPO, and actor-critic.

With --ap it has the one line; prints losses. The environment is a pole on a cart.
"""

import math
import random
import sys
from collections import deque, namedtuple
from itertools import count

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
random.seed(0)
np.random.seed(0)
torch.manual_seed(0)


class CartPole:
    def __init__(self, seed):
        self.rng = np.random.RandomState(seed)

    def reset(self):
        self.state, self.steps = self.rng.uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32)

    def step(self, action):
        x, speed, angle, turn = self.state
        force = 10.0 if action == 1 else -10.0
        pushed = (force + 0.05 * turn**2 * math.sin(angle)) / 1.1
        turned = (9.8 * math.sin(angle) - math.cos(angle) * pushed) / (0.667 - 0.045 * math.cos(angle) ** 2)
        moved = pushed - 0.045 * turned * math.cos(angle)
        self.state = np.array([x + 0.02 * speed, speed + 0.02 * moved, angle + 0.02 * turn, turn + 0.02 * turned])
        self.steps += 1
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21 or self.steps >= 10
        return self.state.astype(np.float32), 1.0, bool(done)


# -- DQN -----------------------------------------------------------------------------------------------------------

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(4, 32), nn.Linear(32, 2)

    def forward(self, x):
        return self.layer2(F.relu(self.layer1(x)))


policy_net, target_net = DQN().to(device), DQN().to(device)
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory, env = deque(maxlen=100), CartPole(1)


def select_action(state, eps):
    if random.random() > eps:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randint(0, 1)]], device=device, dtype=torch.long)


def optimize_model():
    if len(memory) < 8:
        return
    batch = Transition(*zip(*random.sample(memory, 8)))
    mask = torch.tensor([s is not None for s in batch.next_state], device=device, dtype=torch.bool)
    values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    next_values = torch.zeros(8, device=device)
    with torch.no_grad():
        next_values[mask] = target_net(torch.cat([s for s in batch.next_state if s is not None])).max(1).values
    loss = nn.SmoothL1Loss()(values, ((next_values * 0.99) + torch.cat(batch.reward)).unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    print(f"DQN loss {loss.item():.6f}")


for _ in range(2):
    state = torch.tensor(env.reset(), dtype=torch.float32, device=device).unsqueeze(0)
    for _ in count():
        action = select_action(state, 0.5)
        observation, reward, done = env.step(action.item())
        next_state = None if done else torch.tensor(observation, dtype=torch.float32, device=device).unsqueeze(0)
        memory.append(Transition(state, action, next_state, torch.tensor([reward], device=device)))
        state = next_state
        optimize_model()
        target, current = target_net.state_dict(), policy_net.state_dict()
        for key in current:
            target[key] = current[key] * 0.05 + target[key] * 0.95
        target_net.load_state_dict(target)
        if done:
            break
print(f"target {sum(p.sum() for p in target_net.parameters()):.6f}")

# -- PPO -----------------------------------------------------------------------------------------------------------


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


agent, envs = Agent().to(device), [CartPole(i) for i in range(2)]
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
obs, actions = torch.zeros((6, 2, 4)).to(device), torch.zeros((6, 2)).to(device)
logprobs, rewards, values = (torch.zeros((6, 2)).to(device) for _ in range(3))
next_obs = torch.Tensor(np.stack([e.reset() for e in envs])).to(device)
for step in range(6):
    obs[step] = next_obs
    with torch.no_grad():
        action, logprobs[step], _, value = agent.get_action_and_value(next_obs)
        values[step] = value.flatten()
    actions[step] = action
    results = [e.step(a) for e, a in zip(envs, action.cpu().numpy())]
    rewards[step] = torch.tensor([r[1] for r in results]).to(device).view(-1)
    next_obs = torch.Tensor(np.stack([r[0] for r in results])).to(device)
with torch.no_grad():
    next_value, last = agent.get_value(next_obs).reshape(1, -1), 0
    advantages = torch.zeros_like(rewards).to(device)
    for t in reversed(range(6)):
        delta = rewards[t] + 0.99 * (next_value if t == 5 else values[t + 1]) - values[t]
        advantages[t] = last = delta + 0.99 * 0.95 * last
    returns = advantages + values
b_obs, b_logprobs, b_actions = obs.reshape((-1, 4)), logprobs.reshape(-1), actions.reshape(-1)
b_advantages, b_returns, indices = advantages.reshape(-1), returns.reshape(-1), np.arange(12)
for _ in range(2):
    np.random.shuffle(indices)
    for start in range(0, 12, 6):
        chosen = indices[start : start + 6]
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[chosen], b_actions.long()[chosen])
        ratio = (newlogprob - b_logprobs[chosen]).exp()
        advantage = b_advantages[chosen]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        pg_loss = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
        loss = pg_loss - 0.01 * entropy.mean() + 0.5 * ((newvalue.view(-1) - b_returns[chosen]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        print(f"PPO loss {loss.item():.6f} norm {norm.item():.6f}")

# -- actor-critic ----------------------------------------------------------------------------------------------------

optimizer = torch.optim.Adam(agent.parameters(), lr=3e-2)
for _ in range(2):
    state, saved, episode_rewards = env.reset(), [], []
    for _ in range(1, 100):
        action, log_prob, _, value = agent.get_action_and_value(torch.from_numpy(state).float().to(device))
        saved.append((log_prob, value))
        state, reward, done = env.step(action.item())
        episode_rewards.append(reward)
        if done:
            break
    discounted, R = [], 0
    for r in episode_rewards[::-1]:
        R = r + 0.99 * R
        discounted.insert(0, R)
    discounted = torch.tensor(discounted, device=device)
    discounted = (discounted - discounted.mean()) / (discounted.std() + 1e-7)
    policy_losses = [-log_prob * (R - value.item()) for (log_prob, value), R in zip(saved, discounted)]
    value_losses = [
        F.smooth_l1_loss(value, torch.tensor([R], device=device)) for (_, value), R in zip(saved, discounted)
    ]
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    print(f"actor-critic loss {loss.item():.6f} reward {sum(episode_rewards):.2f}")
