"""PPO and DQN of Stable-Baselines3 on CartPole, with `device="cuda"` where that is available.

With --ap it has the one line; prints losses and mean rewards.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


class PrintLosses(BaseCallback):
    def _on_step(self):
        return True

    def _on_rollout_start(self):
        values = self.logger.name_to_value
        if "train/loss" in values:
            print(f"loss {values['train/loss']:.5f}")


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = make_vec_env("CartPole-v1", n_envs=2, seed=1)
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=2, seed=1, device=device)
    model.learn(total_timesteps=192, callback=PrintLosses())
    mean, _ = evaluate_policy(model, env, n_eval_episodes=2)
    print(f"PPO: mean reward {mean:.4f} weights {sum(p.double().sum().item() for p in model.policy.parameters()):.4f}")

    env = make_vec_env("CartPole-v1", n_envs=1, seed=1)
    model = DQN("MlpPolicy", env, learning_starts=20, train_freq=4, batch_size=16, seed=1, device=device)
    model.learn(total_timesteps=60)
    print(f"DQN: weights {sum(p.double().sum().item() for p in model.policy.parameters()):.4f}")


if __name__ == "__main__":
    main()
