"""CTC training of a tiny random Wav2Vec2 on made-up audio, as the transformers course writes the loop.

With --ap it has the one line; prints losses and a decoded line.
"""

import sys

import numpy as np
import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

VOCABULARY = 12


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    np.random.seed(1)  # for SpecAugment
    config = Wav2Vec2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 6, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        mask_time_prob=0.3,
        mask_time_length=3,
        layerdrop=0.0,
        pad_token_id=0,
    )
    model = Wav2Vec2ForCTC(config).to(device)
    model.freeze_feature_encoder()
    extract = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(5):
        audio = [torch.randn(1600 + 200 * (number % 3)).numpy() for number in range(8)]
        batch = extract(audio, sampling_rate=16000, padding=True, return_tensors="pt").to(device)
        labels = torch.randint(1, VOCABULARY, (8, 5))
        labels[::3, 3:] = -100
        loss = model(**batch, labels=labels.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
    print(f"logits {logits.mean().item():.6f} decoded {logits.argmax(dim=-1)[0].unique_consecutive().tolist()}")


if __name__ == "__main__":
    main()
