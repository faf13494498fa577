"""A2C, SAC and TD3 of Stable-Baselines3 on Pendulum, with `device="cuda"` where that is available.

With --ap it has the one line; prints weights and what was logged.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import numpy as np
from stable_baselines3 import A2C, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise


def report(name, model):
    weights = sum(one.double().sum().item() for one in model.policy.parameters())
    logged = {key: value for key, value in model.logger.name_to_value.items() if "loss" in key}
    print(
        f"{name}: weights {weights:.4f}",
        *(f"{key.split('/')[-1]} {value:.4f}" for key, value in sorted(logged.items())),
    )


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = make_vec_env("Pendulum-v1", n_envs=4, seed=2)
    report("A2C", A2C("MlpPolicy", env, n_steps=4, seed=2, device=device).learn(total_timesteps=48, log_interval=100))
    off_policy = {"learning_starts": 20, "batch_size": 16, "seed": 2, "device": device}
    env = make_vec_env("Pendulum-v1", n_envs=1, seed=2)
    report("SAC", SAC("MlpPolicy", env, **off_policy).learn(total_timesteps=32, log_interval=100))
    env = make_vec_env("Pendulum-v1", n_envs=1, seed=2)
    noise = NormalActionNoise(mean=np.zeros(1), sigma=0.1 * np.ones(1))
    report("TD3", TD3("MlpPolicy", env, action_noise=noise, **off_policy).learn(total_timesteps=32, log_interval=100))


if __name__ == "__main__":
    main()
