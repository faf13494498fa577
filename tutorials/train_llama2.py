#!/usr/bin/env python
"""Fine-tunes Llama 2 13B to summarise: a plain script for one device, and one line that makes it many.

From the root of the repository:

    python tutorials/train_llama2.py                # Llama-2-13b on the news articles of cnn_dailymail, from the hub
    python tutorials/train_llama2.py --embedded     # a small Llama and summaries of docstrings, no hub needed
"""

from pathlib import Path

import torch
from transformers import AdamW, AutoModelForCausalLM, AutoTokenizer
from tutorial_arguments import parse_training_arguments
from tutorial_data import (
    EMBEDDED_MODEL,
    EMBEDDED_SUMMARIES,
    SAMPLE_ARTICLE,
    first_rows,
    load_rows,
    set_pad_token,
    summary_prompt,
    tokenize_summaries,
)
from tutorial_evaluation import answer, held_out_loss
from tutorial_report import Progress

PUBLIC = {
    "model": "meta-llama/Llama-2-13b-hf",
    "dataset": "cnn_dailymail:3.0.0",
    "batch_size": 64,
    "block_size": 1024,
    "lr": 1e-5,
    "save_path": Path("outputs/train_llama2"),
}
EMBEDDED = {
    "model": EMBEDDED_MODEL,
    "dataset": EMBEDDED_SUMMARIES,
    "batch_size": 8,
    "block_size": 128,
    "lr": 5e-5,
    "max_steps": 16,
    "eval_rows": 32,
    "sample_tokens": 40,
    "log_interval": 2,
}
SAMPLE = summary_prompt(SAMPLE_ARTICLE)


# --8<-- [start:masks]
# 1 where there is text, 0 where there are pads
def create_mask(input_ids, tokenizer):
    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return (input_ids != pad_token_id).long()


# Pads are no part of the loss
def mask_pads(input_ids, tokenizer, ignore_index=-100):
    return input_ids.masked_fill(create_mask(input_ids, tokenizer) == 0, ignore_index)


# --8<-- [end:masks]


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
    set_pad_token(tokenizer)
    # --8<-- [end:load]

    dataset = load_rows(args.dataset, columns=("article", "highlights"))
    dataset["test"] = first_rows(dataset["test"], args.eval_rows)
    dataset = tokenize_summaries(dataset, tokenizer, args.block_size).with_format("torch")
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
            labels = mask_pads(input_ids, tokenizer)
            attn_mask = create_mask(input_ids, tokenizer)
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
