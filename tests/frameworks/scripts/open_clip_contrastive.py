"""Trains a small CLIP of open_clip from nothing with its contrastive loss, and classifies by captions.

With --ap it has the one line; prints losses and probabilities.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

from open_clip import ClipLoss  # noqa: E402
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg  # noqa: E402

NUM_PAIRS, BATCH_SIZE, VOCABULARY, CONTEXT = 48, 12, 64, 8


def made_up_pairs():
    """Returns pictures, and captions whose first word says how bright a picture is; the last word ends them."""
    brightness = torch.randint(1, 8, (NUM_PAIRS,))
    captions = torch.randint(8, VOCABULARY - 1, (NUM_PAIRS, CONTEXT))
    captions[:, 0] = brightness
    captions[torch.arange(NUM_PAIRS), torch.randint(3, CONTEXT, (NUM_PAIRS,))] = VOCABULARY - 1
    return torch.randn(NUM_PAIRS, 3, 32, 32) / 2 + brightness.view(-1, 1, 1, 1) / 4, captions


def main():
    torch.manual_seed(8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pictures, captions = made_up_pairs()
    model = CLIP(
        embed_dim=32,
        vision_cfg=CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32),
        text_cfg=CLIPTextCfg(context_length=CONTEXT, vocab_size=VOCABULARY, width=32, heads=2, layers=2),
        output_dict=True,
    ).to(device)
    criterion = ClipLoss()
    gains = [parameter for name, parameter in model.named_parameters() if parameter.ndim < 2 or "scale" in name]
    gain_ids = {id(parameter) for parameter in gains}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in gain_ids]
    groups = [{"params": gains, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
    for _ in range(2):
        model.train()
        for batch in torch.randperm(NUM_PAIRS).split(BATCH_SIZE):
            optimizer.zero_grad()
            features = model(pictures[batch].to(device), captions[batch].to(device))
            loss = criterion(**features, output_dict=True)["contrastive_loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, 4.6052)
            print(f"loss {loss.item():.6f} scale {model.logit_scale.exp().item():.6f}")
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        image_features = model.encode_image(pictures[:4].to(device), normalize=True)
        text_features = model.encode_text(captions[:4].to(device), normalize=True)
        probabilities = (100.0 * image_features @ text_features.T).softmax(dim=-1).cpu()
    for row in probabilities:
        print("probabilities", *(f"{value:.6f}" for value in row))


if __name__ == "__main__":
    main()
