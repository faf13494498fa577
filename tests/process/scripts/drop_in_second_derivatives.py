"""Gradients of gradients in the ways of public scripts: WGAN-GP, a PINN for Burgers' equation, MAML on sine waves.

With --ap it has the one line; prints every loss.
"""

import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import autograd
from torch.autograd import Variable

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
torch.manual_seed(0)
np.random.seed(0)

# -- WGAN-GP, in the way of eriklindernoren/PyTorch-GAN ------------------------------------------------------------

IMG_SHAPE, LATENT_DIM, LAMBDA_GP, N_CRITIC = (1, 28, 28), 8, 10, 2


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(LATENT_DIM, 32),
            nn.BatchNorm1d(32, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(32, 784),
            nn.Tanh(),
        )

    def forward(self, z):
        img = self.model(z)
        return img.view(img.shape[0], *IMG_SHAPE)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(4 * 14 * 14, 16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(16, 1),
        )

    def forward(self, img):
        return self.model(img)


def compute_gradient_penalty(D, real_samples, fake_samples):
    alpha = Tensor(np.random.random((real_samples.size(0), 1, 1, 1)))
    interpolates = (alpha * real_samples + (1 - alpha) * fake_samples).requires_grad_(True)
    d_interpolates = D(interpolates)
    fake = Variable(Tensor(real_samples.shape[0], 1).fill_(1.0), requires_grad=False)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=fake,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


generator, discriminator = Generator().to(device), Discriminator().to(device)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999), eps=1e-5)
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999), eps=1e-5)
images = torch.rand(48, *IMG_SHAPE) * 2 - 1
for i in range(6):
    real_imgs = Variable(images[8 * i : 8 * i + 8].type(Tensor))
    optimizer_D.zero_grad()
    z = Variable(Tensor(np.random.normal(0, 1, (real_imgs.shape[0], LATENT_DIM))))
    fake_imgs = generator(z)
    penalty = compute_gradient_penalty(discriminator, real_imgs.data, fake_imgs.data)
    d_loss = -torch.mean(discriminator(real_imgs)) + torch.mean(discriminator(fake_imgs)) + LAMBDA_GP * penalty
    d_loss.backward()
    optimizer_D.step()
    print(f"wgan-gp D loss {d_loss.item():.6f} penalty {penalty.item():.6f}")
    optimizer_G.zero_grad()
    if i % N_CRITIC == 0:
        g_loss = -torch.mean(discriminator(generator(z)))
        g_loss.backward()
        optimizer_G.step()
        print(f"wgan-gp G loss {g_loss.item():.6f}")

# -- R1, in the way of StyleGAN: every other step, in a step of its own --------------------------------------------

for i in range(4):
    real_imgs = images[8 * i : 8 * i + 8].to(device)
    real_imgs.requires_grad = True
    real_pred = discriminator(real_imgs)
    if i % 2 == 0:
        (grad_real,) = autograd.grad(outputs=real_pred.sum(), inputs=real_imgs, create_graph=True)
        r1_loss = grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()
        discriminator.zero_grad()
        (10 / 2 * r1_loss * 2 + 0 * real_pred[0]).backward()
    else:
        r1_loss = F.softplus(-real_pred).mean()
        discriminator.zero_grad()
        r1_loss.backward()
    optimizer_D.step()
    print(f"r1 loss {r1_loss.item():.6f}")

# -- a physics-informed network ------------------------------------------------------------------------------------


class PINN(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )  # fmt: skip

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


def residual(model, x, t):
    u = model(x, t)
    u_t = autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
    u_x = autograd.grad(u, x, grad_outputs=torch.ones_like(u), retain_graph=True, create_graph=True)[0]
    u_xx = autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True, create_graph=True)[0]
    return u_t + u * u_x - (0.01 / torch.pi) * u_xx


pinn = PINN().to(device)
optimizer = torch.optim.Adam(pinn.parameters(), lr=1e-2)
x_f = torch.rand(30, 1, device=device, requires_grad=True)
t_f = torch.rand(30, 1, device=device, requires_grad=True)
x_0 = torch.linspace(-1, 1, 10).view(-1, 1).to(device)
for _ in range(8):
    optimizer.zero_grad()
    loss_f = residual(pinn, x_f, t_f).pow(2).mean()
    loss_u = F.mse_loss(pinn(x_0, torch.zeros_like(x_0)), -torch.sin(torch.pi * x_0))
    loss = loss_u + loss_f
    loss.backward()
    optimizer.step()
    print(f"pinn loss {loss.item():.6f} residual {loss_f.item():.6f}")

# -- MAML ----------------------------------------------------------------------------------------------------------

net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
meta_optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(3):
    meta_optimizer.zero_grad()
    meta_loss = 0.0
    for task in range(2):
        amplitude, phase = 1.0 + task, 0.5 * task
        x_support, x_query = torch.rand(10, 1).to(device) * 10 - 5, torch.rand(10, 1).to(device) * 10 - 5
        inner_loss = F.mse_loss(net(x_support), amplitude * torch.sin(x_support + phase))
        grads = autograd.grad(inner_loss, net.parameters(), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(net.named_parameters(), grads)}
        prediction = torch.func.functional_call(net, fast, (x_query,))
        meta_loss = meta_loss + F.mse_loss(prediction, amplitude * torch.sin(x_query + phase))
    meta_loss.backward()
    meta_optimizer.step()
    print(f"maml loss {meta_loss.item():.6f}")
