"""A variational autoencoder in Pyro: model and guide as functions of registered modules, trained by SVI.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import pyro
import pyro.distributions as dist
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn

SIDE, LATENT = 8, 4


class Encoder(nn.Module):
    """Returns location and scale of the latent variables."""

    def __init__(self, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIDE * SIDE, hidden), nn.Softplus())
        self.location, self.log_scale = nn.Linear(hidden, LATENT), nn.Linear(hidden, LATENT)

    def forward(self, x):
        hidden = self.body(x.reshape(-1, SIDE * SIDE))
        return self.location(hidden), torch.exp(self.log_scale(hidden))


class VAE(nn.Module):
    """Encoder and decoder, and the two functions that SVI takes."""

    def __init__(self, device):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Sequential(nn.Linear(LATENT, 32), nn.Softplus(), nn.Linear(32, SIDE * SIDE), nn.Sigmoid())
        self.to(device)

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            zeros = x.new_zeros(torch.Size((x.shape[0], LATENT)))
            z = pyro.sample("latent", dist.Normal(zeros, torch.ones_like(zeros)).to_event(1))
            picture = self.decoder(z)
            pyro.sample("obs", dist.Bernoulli(picture).to_event(1), obs=x.reshape(-1, SIDE * SIDE))

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            location, scale = self.encoder(x)
            pyro.sample("latent", dist.Normal(location, scale).to_event(1))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    pictures = (torch.rand(64, SIDE, SIDE) < 0.3).float()
    vae = VAE(device)
    svi = SVI(vae.model, vae.guide, Adam({"lr": 1e-2}), loss=Trace_ELBO())
    for _ in range(2):
        for batch in pictures.split(16):
            print(f"loss {svi.step(batch.to(device)) / 16:.6f}")
    print(f"held out: loss {svi.evaluate_loss(pictures[:16].to(device)) / 16:.6f}")


if __name__ == "__main__":
    main()
