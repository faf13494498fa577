"""A diffusion model from scratch, in the way of public tutorials: a UNet, noise tables on the device, an averaged copy.

With --ap it has the one line; prints the losses and what both models sample.
"""

import copy
import math
import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class SinusoidalPositionEmbeddings(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, time):
        device = time.device
        half_dim = self.dim // 2
        embeddings = math.log(10000) / (half_dim - 1)
        embeddings = torch.exp(torch.arange(half_dim, device=device) * -embeddings)
        embeddings = time[:, None] * embeddings[None, :]
        return torch.cat((embeddings.sin(), embeddings.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, i, o, t, up=False):
        super().__init__()
        self.time_mlp = nn.Linear(t, o)
        if up:
            self.conv1 = nn.Conv2d(2 * i, o, 3, padding=1)
            self.transform = nn.ConvTranspose2d(o, o, 4, 2, 1)
        else:
            self.conv1 = nn.Conv2d(i, o, 3, padding=1)
            self.transform = nn.Conv2d(o, o, 4, 2, 1)
        self.conv2 = nn.Conv2d(o, o, 3, padding=1)
        self.bnorm1 = nn.BatchNorm2d(o)
        self.bnorm2 = nn.GroupNorm(2, o)
        self.relu = nn.ReLU()

    def forward(self, x, t):
        h = self.bnorm1(self.relu(self.conv1(x)))
        time_emb = self.relu(self.time_mlp(t))
        time_emb = time_emb[(...,) + (None,) * 2]
        h = h + time_emb
        h = self.bnorm2(self.relu(self.conv2(h)))
        return self.transform(h)


class SimpleUnet(nn.Module):
    def __init__(self):
        super().__init__()
        down, up = (8, 16, 24), (24, 16, 8)
        self.time_mlp = nn.Sequential(SinusoidalPositionEmbeddings(16), nn.Linear(16, 16), nn.ReLU())
        self.conv0 = nn.Conv2d(1, down[0], 3, padding=1)
        self.downs = nn.ModuleList([Block(down[i], down[i + 1], 16) for i in range(2)])
        self.ups = nn.ModuleList([Block(up[i], up[i + 1], 16, up=True) for i in range(2)])
        self.output = nn.Conv2d(up[-1], 1, 1)

    def forward(self, x, timestep):
        t = self.time_mlp(timestep)
        x = self.conv0(x)
        res = []
        for d in self.downs:
            x = d(x, t)
            res.append(x)
        for u in self.ups:
            x = torch.cat((x, res.pop()), dim=1)
            x = u(x, t)
        return self.output(x)


class EMA:
    def __init__(self, beta):
        self.beta = beta
        self.step = 0

    def update_model_average(self, ma_model, current_model):
        for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters()):
            old_weight, up_weight = ma_params.data, current_params.data
            ma_params.data = self.update_average(old_weight, up_weight)

    def update_average(self, old, new):
        if old is None:
            return new
        return old * self.beta + (1 - self.beta) * new

    def step_ema(self, ema_model, model, step_start_ema=2):
        if self.step < step_start_ema:
            self.reset_parameters(ema_model, model)
            self.step += 1
            return
        self.update_model_average(ema_model, model)
        self.step += 1

    def reset_parameters(self, ema_model, model):
        ema_model.load_state_dict(model.state_dict())


class Diffusion:
    def __init__(self, noise_steps=20, beta_start=1e-4, beta_end=0.02, img_size=8, device="cuda"):
        self.noise_steps, self.img_size, self.device = noise_steps, img_size, device
        self.beta = torch.linspace(beta_start, beta_end, noise_steps).to(device)
        self.alpha = 1.0 - self.beta
        self.alpha_hat = torch.cumprod(self.alpha, dim=0)

    def noise_images(self, x, t):
        sqrt_alpha_hat = torch.sqrt(self.alpha_hat[t])[:, None, None, None]
        sqrt_one_minus_alpha_hat = torch.sqrt(1 - self.alpha_hat[t])[:, None, None, None]
        e = torch.randn_like(x)
        return sqrt_alpha_hat * x + sqrt_one_minus_alpha_hat * e, e

    def sample_timesteps(self, n):
        return torch.randint(low=1, high=self.noise_steps, size=(n,))

    def sample(self, model, n):
        model.eval()
        with torch.no_grad():
            x = torch.randn((n, 1, self.img_size, self.img_size)).to(self.device)
            for i in reversed(range(1, self.noise_steps)):
                t = (torch.ones(n) * i).long().to(self.device)
                predicted_noise = model(x, t)
                alpha = self.alpha[t][:, None, None, None]
                alpha_hat = self.alpha_hat[t][:, None, None, None]
                beta = self.beta[t][:, None, None, None]
                if i > 1:
                    noise = torch.randn_like(x)
                else:
                    noise = torch.zeros_like(x)
                x = (
                    1 / torch.sqrt(alpha) * (x - ((1 - alpha) / (torch.sqrt(1 - alpha_hat))) * predicted_noise)
                    + torch.sqrt(beta) * noise
                )
        model.train()
        x = (x.clamp(-1, 1) + 1) / 2
        return (x * 255).type(torch.uint8)


model = SimpleUnet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
mse = nn.MSELoss()
diffusion = Diffusion(device=device)
ema = EMA(0.995)
ema_model = copy.deepcopy(model).eval().requires_grad_(False)
loader = DataLoader(TensorDataset(torch.randn(18, 1, 8, 8).tanh()), batch_size=6)
for _ in range(2):
    for (images,) in loader:
        images = images.to(device)
        t = diffusion.sample_timesteps(images.shape[0]).to(device)
        x_t, noise = diffusion.noise_images(images, t)
        predicted_noise = model(x_t, t)
        loss = mse(noise, predicted_noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.step_ema(ema_model, model)
        print(f"loss {loss.item():.6f}")
    s = diffusion.sample(model, 3)
    s2 = diffusion.sample(ema_model, 3)
    print(f"sample {s.float().mean().item():.2f} {s2.float().mean().item():.2f}")
