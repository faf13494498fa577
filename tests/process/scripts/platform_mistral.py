"""The fragments of the platform's Mistral tutorial in their order, with local files in place of names."""

import argparse
import copy

import torch
from transformers import AdamW, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=5)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epoch", type=int, default=2)
args = parser.parse_args()

torch.manual_seed(0)
torch.moreh.option.enable_advanced_parallelization()
model = AutoModelForCausalLM.from_pretrained("./mistral")
dataset = torch.load("mistral_dataset.pt")

# Create a DataLoader for the training set
train_dataloader = torch.utils.data.DataLoader(
    dataset,
    batch_size=args.batch_size,
    shuffle=True,
    drop_last=True,
)


# Mask pad tokens for training
def mask_pads(input_ids, attention_mask, ignore_index=-100):
    idx_mask = attention_mask
    labels = copy.deepcopy(input_ids)
    labels[~idx_mask.bool()] = ignore_index
    return labels


# Define AdamW optimizer
optim = AdamW(model.parameters(), lr=args.lr)

# Start training
for epoch in range(args.epoch):
    for i, batch in enumerate(train_dataloader, 0):
        input_ids = batch["input_ids"]
        attn_mask = batch["attention_mask"]
        labels = mask_pads(input_ids, attn_mask)
        outputs = model(
            input_ids.cuda(),
            attention_mask=attn_mask.cuda(),
            labels=labels.cuda(),
            use_cache=False,
        )

        loss = outputs[0]
        loss.backward()

        optim.step()
        model.zero_grad(set_to_none=True)
        print(f"{epoch} {i} loss {loss.item():.6f}")

model.save_pretrained("./tuned")
