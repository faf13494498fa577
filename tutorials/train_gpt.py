#!/usr/bin/env python
"""Fine-tunes a GPT to write Python: a plain script for one device, and one line that makes it many.

From the root of the repository:

    python tutorials/train_gpt.py                # Cerebras-GPT-13B on Evol-Instruct-Python-26k, from the hub
    python tutorials/train_gpt.py --embedded     # a small model and data set prepared on this machine, no hub needed
"""

from pathlib import Path

import torch
from transformers import AdamW, AutoModelForCausalLM, AutoTokenizer
from tutorial_arguments import parse_training_arguments
from tutorial_data import EMBEDDED_DATASET, EMBEDDED_MODEL, PROMPT, first_rows, load_rows, tokenize
from tutorial_evaluation import answer, held_out_loss
from tutorial_report import Progress

PUBLIC = {
    "model": "cerebras/Cerebras-GPT-13B",
    "dataset": "mlabonne/Evol-Instruct-Python-26k",
    "batch_size": 16,
    "block_size": 1024,
    "lr": 1e-5,
    "save_path": Path("outputs/train_gpt"),
}
EMBEDDED = {
    "model": EMBEDDED_MODEL,
    "dataset": EMBEDDED_DATASET,
    "batch_size": 8,
    "block_size": 96,
    "lr": 5e-5,
    "max_steps": 20,
    "eval_rows": 32,
    "log_interval": 2,
}
SAMPLE = PROMPT.format(instruction="Write a Python function `count_vowels(text)` to return the number of vowels of it.")


# Pads are no part of the loss
def mask_pads(input_ids, attention_mask, ignore_index=-100):
    return input_ids.masked_fill(attention_mask == 0, ignore_index)


def main() -> None:
    args = parse_training_arguments(__doc__, PUBLIC, EMBEDDED)
    torch.manual_seed(args.seed)

    # --8<-- [start:load]
    # The one line
    if not args.no_ap:
        torch.moreh.option.enable_advanced_parallelization(devices=args.devices, plan=args.plan)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # --8<-- [end:load]

    dataset = load_rows(args.dataset, columns=("instruction", "output"))
    dataset["test"] = first_rows(dataset["test"], args.eval_rows)
    dataset = tokenize(dataset, tokenizer, args.block_size).with_format("torch")
    train_dataloader = torch.utils.data.DataLoader(
        dataset["train"],
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    progress = Progress(len(train_dataloader), args)
    test_dataloader = torch.utils.data.DataLoader(dataset["test"], batch_size=args.batch_size)

    sample_before = answer(model, tokenizer, SAMPLE, args.sample_tokens) if args.sample_tokens else None
    model.to(device)
    loss_before = held_out_loss(model, test_dataloader, device) if args.eval_rows else None

    # --8<-- [start:loop]
    model.train()
    optim = AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epoch):
        for batch in train_dataloader:
            if progress.done:
                break
            input_ids = batch["input_ids"]
            attn_mask = batch["attention_mask"]
            labels = mask_pads(input_ids, attn_mask)
            outputs = model(
                input_ids.to(device),
                attention_mask=attn_mask.to(device),
                labels=labels.to(device),
                use_cache=False,
            )

            loss = outputs[0]
            loss.backward()

            optim.step()
            model.zero_grad(set_to_none=True)
            progress.step(epoch, loss, input_ids.numel())
    # --8<-- [end:loop]

    loss_after = held_out_loss(model, test_dataloader, device) if args.eval_rows else None

    # An ordinary folder
    model.to("cpu")
    model.save_pretrained(args.save_path)
    tokenizer.save_pretrained(args.save_path)
    print(f"model saved to {args.save_path}")
    progress.save(args.save_path, loss_before, loss_after)
    if args.sample_tokens:
        print(f"\n>>> {SAMPLE}--- before\n{sample_before}")
        print(f"--- after\n{answer(model, tokenizer, SAMPLE, args.sample_tokens)}")


if __name__ == "__main__":
    main()
