"""Trains a tiny UNet2DModel of diffusers to predict noise (DDPM), with an average of its weights, and samples from it.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    model = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)
    average = EMAModel(model.parameters(), decay=0.9)
    scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6)
    for _ in range(6):
        clean = torch.randn(8, 1, 16, 16).to(device)
        noise = torch.randn(clean.shape, device=clean.device)
        timesteps = torch.randint(0, 100, (8,), device=clean.device, dtype=torch.int64)
        noisy = scheduler.add_noise(clean, noise, timesteps)
        predicted = model(noisy, timesteps, return_dict=False)[0]
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        print(f"loss {loss.item():.6f}")
    average.copy_to(model.parameters())
    pipeline = DDPMPipeline(unet=model, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        batch_size=2, generator=torch.Generator("cpu").manual_seed(0), num_inference_steps=4, output_type="np"
    ).images
    print(f"sampled {float(pictures.mean()):.5f}")


if __name__ == "__main__":
    main()
