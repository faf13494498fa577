"""A GAN with Lightning's manual optimisation: two optimizers, batch normalisation, both toggled in turn.

With --ap it has the one line; prints losses.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

import lightning as L  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

LATENT = 6


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(LATENT, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Tanh()
        )

    def forward(self, z):
        return self.model(z).view(z.size(0), 1, 8, 8)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, pictures):
        return self.model(pictures.view(pictures.size(0), -1))


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, found, wanted):
        return F.binary_cross_entropy(found, wanted)

    def training_step(self, batch):
        (pictures,) = batch
        of_generator, of_discriminator = self.optimizers()
        z = torch.randn(pictures.shape[0], LATENT).type_as(pictures)

        self.toggle_optimizer(of_generator)
        valid = torch.ones(pictures.size(0), 1).type_as(pictures)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss)
        self.manual_backward(g_loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        real_loss = self.adversarial_loss(self.discriminator(pictures), valid)
        fake = torch.zeros(pictures.size(0), 1).type_as(pictures)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss)
        self.manual_backward(d_loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)
        print(f"generator: loss {g_loss.item():.6f} discriminator: loss {d_loss.item():.6f}")

    def configure_optimizers(self):
        settings = {"lr": 2e-3, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.generator.parameters(), **settings),
            torch.optim.Adam(self.discriminator.parameters(), **settings),
        ], []


def main():
    L.seed_everything(8, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(48, 1, 8, 8)), batch_size=12, shuffle=True)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GAN()
    trainer.fit(model, loader)
    print(f"variances: running {model.generator.model[1].running_var.mean().item():.6f}")


if __name__ == "__main__":
    main()
