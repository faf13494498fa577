"""The fragments of the platform's Llama 2 tutorial in their order, with local folders in place of names on the hub."""

from transformers import AdamW, AutoModelForCausalLM, AutoTokenizer  # isort: skip
import argparse
import copy
import time

import torch
from datasets import load_dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=5)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--num-train-epochs", type=int, default=2)
args = parser.parse_args()

torch.manual_seed(0)
torch.moreh.option.enable_advanced_parallelization()

model = AutoModelForCausalLM.from_pretrained("./llama")
tokenizer = AutoTokenizer.from_pretrained("./llama")


def preprocess(row):
    text = row["instruction"] + row["output"]
    return {"input_ids": tokenizer(text, padding="max_length", max_length=40, truncation=True)["input_ids"]}


dataset = load_dataset("./instructions").with_format("torch")
dataset = dataset.map(preprocess, num_proc=2)

# Create a DataLoader for the training set
train_dataloader = torch.utils.data.DataLoader(
    dataset["train"],
    batch_size=args.batch_size,
    shuffle=True,
    drop_last=True,
)


# Compose pad token mask
def create_mask(input_ids, tokenizer):
    pad_token_ids = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return (input_ids != pad_token_ids).long()


# Mask pad tokens for training
def mask_pads(inputs, tokenizer, ignore_index=-100):
    idx_mask = create_mask(inputs, tokenizer)
    labels = copy.deepcopy(inputs)
    labels[~idx_mask.bool()] = ignore_index
    return labels


# Define AdamW optimizer
optim = AdamW(model.parameters(), lr=args.lr)

# Start training
for epoch in range(args.num_train_epochs):
    for step, batch in enumerate(train_dataloader, start=1):
        start_time = time.perf_counter()
        input_ids = batch["input_ids"]
        inputs, labels = input_ids, mask_pads(input_ids, tokenizer)
        attn_mask = create_mask(inputs, tokenizer)
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
        print(f"{epoch} {step} loss {loss.item():.6f}")

model.save_pretrained("./tuned")
