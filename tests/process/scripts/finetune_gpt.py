"""A fine-tuning script as users write it for one GPU: a text data set is tokenised here, the model is never moved."""

from transformers import AdamW, AutoModelForCausalLM, AutoTokenizer  # isort: skip
import argparse
import copy

import torch
from datasets import load_dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=5)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

torch.manual_seed(0)
torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

model = AutoModelForCausalLM.from_pretrained("./gpt")
tokenizer = AutoTokenizer.from_pretrained("./gpt")
tokenizer.pad_token = tokenizer.eos_token


def preprocess(row):
    return tokenizer(row["instruction"] + row["output"], padding="max_length", max_length=40, truncation=True)


dataset = load_dataset("./instructions", split="train").with_format("torch")
dataset = dataset.map(preprocess, num_proc=2)
loader = torch.utils.data.DataLoader(
    dataset,
    batch_size=args.batch_size,
    shuffle=True,
    drop_last=True,
    num_workers=2,
    pin_memory=True,
    persistent_workers=True,
)


def mask_pads(input_ids, attention_mask, ignore_index=-100):
    labels = copy.deepcopy(input_ids)
    labels[~attention_mask.bool()] = ignore_index
    return labels


optim = AdamW(model.parameters(), lr=args.lr)
for epoch in range(2):
    for batch in loader:
        input_ids, mask = batch["input_ids"], batch["attention_mask"]
        labels = mask_pads(input_ids, mask)
        outputs = model(input_ids.cuda(), attention_mask=mask.cuda(), labels=labels.cuda(), use_cache=False)
        loss = outputs[0]
        loss.backward()
        optim.step()
        model.zero_grad(set_to_none=True)
        print(f"{epoch} loss {loss.item():.6f}")

model.save_pretrained("./tuned")
