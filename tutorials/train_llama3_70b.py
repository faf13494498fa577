#!/usr/bin/env python
"""Fine-tunes Llama 3 70B to summarise: a plain script for one device, and one line that makes it many.

From the root of the repository:

    python tutorials/train_llama3_70b.py --show-plan  # the plan for 64 devices, beside a published run; starts nothing
    python tutorials/train_llama3_70b.py              # Meta-Llama-3-70B on cnn_dailymail, from the hub
    python tutorials/train_llama3_70b.py --embedded   # a small Llama in 8 stages on 8 CPU workers, no hub needed
"""

import argparse
from pathlib import Path

import torch
from train_llama2 import create_mask, mask_pads
from transformers import AdamW, AutoModelForCausalLM, AutoTokenizer
from tutorial_arguments import add_evaluation, parse_training_arguments
from tutorial_data import (
    EMBEDDED_MODEL,
    EMBEDDED_SUMMARIES,
    first_rows,
    load_rows,
    set_pad_token,
    tokenize_summaries,
)
from tutorial_evaluation import held_out_loss
from tutorial_report import Progress

PUBLIC = {
    "model": "meta-llama/Meta-Llama-3-70B",
    "dataset": "cnn_dailymail:3.0.0",
    "batch_size": 512,
    "block_size": 1024,
    "lr": 1e-5,
    "eval_rows": 0,
    "save_path": Path("outputs/train_llama3_70b"),
}
EMBEDDED = {
    "model": EMBEDDED_MODEL,
    "dataset": EMBEDDED_SUMMARIES,
    "batch_size": 16,
    "block_size": 96,
    "lr": 5e-5,
    "max_steps": 6,
    "eval_rows": 16,
    "log_interval": 1,
    # The shape of the published plan, 8 stages on 64 devices, on 8: two stages a device, two devices a shard
    "plan": "shard=2,pipeline=4,stages_per_device=2,schedule=interleaved,micro_batches=8,recompute=full",
}
# What the plan is shown for: 32 MI250 of 2 devices each. Published for it, about 4,062 tokens/s.
SHOWN = ("Llama3-70B", "--devices", "64xMI250", "--global-batch", "512", "--seq-len", "1024")
PUBLISHED_PLAN = "shard=8,pipeline=8,micro_batches=64,recompute=full,precision=bf16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_evaluation(parser)
    parser.add_argument("--show-plan", action="store_true",
                        help="print the plan for 64 MI250 and the published one beside it, and end")  # fmt: skip


def show_plan() -> int:
    """Prints the planner's choice and the published plan, with memory and time; returns the exit status."""
    from moreh_ap.cli.main import main as moreh_ap

    status = moreh_ap(["plan", *SHOWN, "--top", "3"])
    print("\nPublished: 8 stages, 64 micro-batches, full recomputation, sharded; about 4,062 tokens/s. Our estimate:\n")
    return status or moreh_ap(["plan", *SHOWN, "--compare", PUBLISHED_PLAN])


def main() -> None:
    args = parse_training_arguments(__doc__, PUBLIC, EMBEDDED, add_arguments)
    if args.show_plan:
        raise SystemExit(show_plan())
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

    # An ordinary folder, written while the model is on the workers
    model.save_pretrained(args.save_path)
    tokenizer.save_pretrained(args.save_path)
    print(f"model saved to {args.save_path}")
    progress.save(args.save_path, loss_before, loss_after)


if __name__ == "__main__":
    main()
