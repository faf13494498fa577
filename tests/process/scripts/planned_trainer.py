"""A script with a Trainer, a model of a folder, and files that it writes before it trains."""

import json
import os
import sys

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(64) + index
        return {"input_ids": ids, "labels": ids}


def main(folder, out):
    torch.moreh.option.enable_advanced_parallelization()
    model = AutoModelForCausalLM.from_pretrained(folder)
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "args.json"), "w") as file:
        json.dump(sys.argv[1:], file)
    model.save_pretrained(os.path.join(out, "before"))
    arguments = TrainingArguments(out, per_device_train_batch_size=16, max_steps=2, report_to="none")
    Trainer(model=model, args=arguments, train_dataset=Rows()).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
