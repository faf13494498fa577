"""Adversarial training on small pictures: two models, two optimizers, and targets that are overwritten in place.

With --ap it has the one line; prints both losses, the discriminator's mean outputs, and a norm of generated pictures.
"""

import sys

import torch
from torch import nn
from torch.optim import Adam

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

LATENT_SIZE, SIDE, BATCH_SIZE = 10, 8, 8
FAKE, REAL = 0, 1


class Discriminator(nn.Module):
    """Returns for each picture the probability that it is real."""

    def __init__(self, channels=8):
        super().__init__()
        more = channels * 2
        self.layers = nn.Sequential(nn.Conv2d(1, channels, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True))
        self.layers.extend([nn.Conv2d(channels, more, 3, 1, 1, bias=False), nn.BatchNorm2d(more)])
        self.layers.extend([nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(more, 1, 4, 1, 0, bias=False), nn.Sigmoid()])

    def forward(self, pictures):
        return self.layers(pictures).view(-1, 1).squeeze(1)


class Generator(nn.Module):
    """Returns pictures of `SIDE` by `SIDE` for latents of shape (pictures, LATENT_SIZE, 1, 1)."""

    def __init__(self, channels=16):
        super().__init__()
        widen = [nn.ConvTranspose2d(LATENT_SIZE, channels, 4, 1, 0, bias=False), nn.BatchNorm2d(channels)]
        draw = [nn.ConvTranspose2d(channels, 1, 4, 2, 1, bias=False), nn.Tanh()]
        self.layers = nn.Sequential(*widen, nn.ReLU(True), *draw)

    def forward(self, latents):
        return self.layers(latents)


def redraw(layer):
    """Draws the weights of a layer again, near 0 for a convolution and near 1 for a norm."""
    kind = layer.__class__.__name__
    is_norm = kind.startswith("BatchNorm")
    if is_norm:
        nn.init.zeros_(layer.bias)
    if is_norm or kind.startswith("Conv"):
        nn.init.normal_(layer.weight, mean=float(is_norm), std=0.02)


class AdversarialTraining:
    """Both models with their optimizers, and the discriminator's targets for the batch at hand."""

    def __init__(self, device):
        self.device, self.criterion = device, nn.BCELoss()
        self.discriminator = Discriminator().to(device).apply(redraw)
        self.generator = Generator().to(device).apply(redraw)
        self.discriminator_optimizer, self.generator_optimizer = (
            Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999)) for model in (self.discriminator, self.generator)
        )

    def latents(self, count):
        return torch.randn(count, LATENT_SIZE, 1, 1, device=self.device)

    def step_discriminator(self, real):
        """Returns the loss, the mean output for real pictures, and the generated pictures."""
        self.discriminator.zero_grad()
        self.target = torch.full((real.size(0),), REAL, dtype=real.dtype, device=self.device)
        probability = self.discriminator(real)
        loss_of_real = self.criterion(probability, self.target)
        loss_of_real.backward()
        mean_output = probability.mean().item()

        generated = self.generator(self.latents(real.size(0)))
        self.target.fill_(FAKE)
        loss_of_generated = self.criterion(self.discriminator(generated.detach()), self.target)
        loss_of_generated.backward()
        loss = loss_of_real + loss_of_generated
        self.discriminator_optimizer.step()
        return loss, mean_output, generated

    def step_generator(self, generated):
        """Returns the loss, which is low where generated pictures pass for real, and the mean output for them."""
        self.generator.zero_grad()
        self.target.fill_(REAL)
        probability = self.discriminator(generated)
        loss = self.criterion(probability, self.target)
        loss.backward()
        mean_output = probability.mean().item()
        self.generator_optimizer.step()
        return loss, mean_output


torch.manual_seed(31)
training = AdversarialTraining(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
same_latents = training.latents(BATCH_SIZE)
pictures = torch.randn(6 * BATCH_SIZE, 1, SIDE, SIDE).tanh()
for _ in range(2):
    for batch in pictures.split(BATCH_SIZE):
        discriminator_loss, mean_real, generated = training.step_discriminator(batch.to(training.device))
        generator_loss, mean_generated = training.step_generator(generated)
        print(f"discriminator loss {discriminator_loss.item():.6f}, mean of real {mean_real:.6f}")
        print(f"generator loss {generator_loss.item():.6f}, mean of generated {mean_generated:.6f}")
with torch.no_grad():
    final = training.generator(same_latents).detach().cpu()
print(f"norm {final.norm():.6f}")
