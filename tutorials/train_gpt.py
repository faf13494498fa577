#!/usr/bin/env python
"""Fine-tunes a GPT to write Python: a plain script for one device, and one line that makes it many.

From the root of the repository:

    python tutorials/train_gpt.py                # Cerebras-GPT-13B on Evol-Instruct-Python-26k, from the hub
    python tutorials/train_gpt.py --embedded     # a small model and data set prepared on this machine, no hub needed
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from transformers import AdamW, AutoModelForCausalLM, AutoTokenizer
from tutorial_data import EMBEDDED_DATASET, EMBEDDED_MODEL, PROMPT, embedded_folder, load_rows, tokenize
from tutorial_plot import save_loss_plot

SAMPLE_INSTRUCTION = "Write a Python function `count_vowels(text)` to return the number of vowels in a text."


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cerebras/Cerebras-GPT-13B", help="name on the hub, or a folder")
    parser.add_argument("--dataset", default="mlabonne/Evol-Instruct-Python-26k", help="name on the hub, or a folder")
    parser.add_argument("--embedded", action="store_true", help="the small embedded model and data, and sizes to match")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step, over all devices together")
    parser.add_argument("--block-size", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--epoch", type=int, default=1, help="passes over the data")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps (0: at the end of the data)")
    parser.add_argument("--eval-rows", type=int, default=256, help="held-out rows for the loss before and after")
    parser.add_argument("--sample-tokens", type=int, default=64, help="length of the sample before and after (0: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines of progress")
    parser.add_argument("--save-path", type=Path, default=Path("outputs/train_gpt"))
    parser.add_argument("--devices", type=int, help="devices to use (default: all)")
    parser.add_argument("--plan", help='parallel plan, such as "replicate=2" (default: chosen for you)')
    parser.add_argument("--no-ap", action="store_true", help="leave the one line out: one ordinary GPU")
    if parser.parse_known_args()[0].embedded:
        parser.set_defaults(
            model=embedded_folder(EMBEDDED_MODEL),
            dataset=embedded_folder(EMBEDDED_DATASET),
            batch_size=8,
            block_size=96,
            lr=5e-5,
            max_steps=20,
            eval_rows=32,
            log_interval=2,
        )
    args = parser.parse_args()
    for name in ("batch_size", "block_size", "epoch", "eval_rows", "log_interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    return args


# Mask pad tokens for training
def mask_pads(input_ids, attention_mask, ignore_index=-100):
    labels = copy.deepcopy(input_ids)
    labels[~attention_mask.bool()] = ignore_index
    return labels


@torch.no_grad()
def evaluate(model, dataloader) -> float:
    """Returns the mean loss per held-out token."""
    model.eval()
    losses, counts = [], []
    for batch in dataloader:
        labels = mask_pads(batch["input_ids"], batch["attention_mask"])
        outputs = model(
            batch["input_ids"].cuda(),
            attention_mask=batch["attention_mask"].cuda(),
            labels=labels.cuda(),
            use_cache=False,
        )
        losses.append(outputs[0])
        counts.append((labels[:, 1:] != -100).sum().item())
    model.train()
    return sum(loss.item() * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


@torch.no_grad()
def sample(model, tokenizer, max_new_tokens: int) -> str:
    """Returns what the model answers, greedily, to one instruction."""
    model.eval()
    prompt = tokenizer(PROMPT.format(instruction=SAMPLE_INSTRUCTION), return_tensors="pt").to(model.device)
    tokens = model.generate(
        **prompt,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    args = parse_arguments()
    started_s = time.perf_counter()
    torch.manual_seed(args.seed)

    # The one line
    if not args.no_ap:
        torch.moreh.option.enable_advanced_parallelization(devices=args.devices, plan=args.plan)

    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    dataset = tokenize(load_rows(args.dataset), tokenizer, args.block_size).with_format("torch")

    # Create a DataLoader for the training set
    train_dataloader = torch.utils.data.DataLoader(
        dataset["train"],
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    held_out = dataset["test"].select(range(min(args.eval_rows, len(dataset["test"]))))
    held_out_dataloader = torch.utils.data.DataLoader(held_out, batch_size=args.batch_size)

    num_steps = args.epoch * len(train_dataloader)
    num_steps = min(num_steps, args.max_steps) if args.max_steps else num_steps
    if num_steps < 1:
        raise SystemExit(f"{len(dataset['train'])} rows do not fill one batch of {args.batch_size}")

    model.cuda()
    loss_before = evaluate(model, held_out_dataloader)
    sample_before = sample(model, tokenizer, args.sample_tokens) if args.sample_tokens else None
    model.train()
    print(f"held-out loss before: {loss_before:.4f}")
    print(f"training: {num_steps} steps of {args.batch_size} x {args.block_size} tokens")

    # Define AdamW optimizer
    optim = AdamW(model.parameters(), lr=args.lr)

    # Start training
    losses, step = [], 0
    tokens, interval_s = 0, time.perf_counter()
    for epoch in range(args.epoch):
        for batch in train_dataloader:
            if step == num_steps:
                break
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

            step += 1
            tokens += input_ids.numel()
            losses.append(loss.detach())
            if step % args.log_interval == 0 or step == num_steps:
                value, now_s = loss.item(), time.perf_counter()  # reading the loss waits for the step
                print(f"[epoch {epoch + 1}/{args.epoch}, step {step}/{num_steps}] loss {value:.4f}, "
                      f"{tokens / (now_s - interval_s):,.0f} tokens/s", flush=True)  # fmt: skip
                tokens, interval_s = 0, now_s

    loss_after = evaluate(model, held_out_dataloader)
    print(f"held-out loss before: {loss_before:.4f}, after: {loss_after:.4f}")
    sample_after = sample(model, tokenizer, args.sample_tokens) if args.sample_tokens else None

    # Save the result: an ordinary folder
    model.to("cpu")
    model.save_pretrained(args.save_path)
    tokenizer.save_pretrained(args.save_path)
    print(f"model saved to {args.save_path}")

    plot_path = args.save_path / "loss.png"
    save_loss_plot(plot_path, [value.item() for value in losses], (loss_before, loss_after), Path(args.model).name)
    print(f"loss plot saved to {plot_path}")
    if sample_before is not None:
        print(f"\n>>> {SAMPLE_INSTRUCTION}\n--- before\n{sample_before}")
        print(f"--- after\n{sample_after}")
    print(f"\ntotal time: {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
