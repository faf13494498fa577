#!/usr/bin/env python
"""Fine-tunes Mistral 7B to write Python: a plain script for one device, and one line that makes it many.

From the root of the repository, after `python tutorials/prepare_mistral.py` with the same flag or none:

    python tutorials/train_mistral.py                # ./mistral-7b and mistral_dataset.pt
    python tutorials/train_mistral.py --embedded     # a Mistral of 135 million parameters, no hub needed
"""

from pathlib import Path

import torch
from transformers import AdamW, AutoModelForCausalLM, AutoTokenizer
from tutorial_arguments import parse_training_arguments
from tutorial_data import PROMPT
from tutorial_evaluation import answer, held_out_loss
from tutorial_report import Progress

PUBLIC = {
    "model": "./mistral-7b",
    "dataset": "mistral_dataset.pt",
    "batch_size": 256,
    "lr": 1e-5,
    "save_path": Path("outputs/train_mistral"),
}
EMBEDDED = {
    "model": "outputs/mistral-135m",
    "dataset": "outputs/mistral_dataset.pt",
    "batch_size": 8,
    "lr": 5e-5,
    "max_steps": 16,
    "eval_rows": 32,
    "log_interval": 2,
}
SAMPLE = PROMPT.format(instruction="Write a Python function `is_even(number)` that tells whether a number is even.")


# Pads are no part of the loss
def mask_pads(input_ids, attention_mask, ignore_index=-100):
    return input_ids.masked_fill(attention_mask == 0, ignore_index)


def main() -> None:
    args = parse_training_arguments(__doc__, PUBLIC, EMBEDDED)
    for path in (args.model, args.dataset):
        if not Path(path).exists():
            command = "python tutorials/prepare_mistral.py" + (" --embedded" if args.embedded else "")
            raise SystemExit(f"{path} does not exist; prepare it with: {command}")
    torch.manual_seed(args.seed)

    # --8<-- [start:load]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dataset = torch.load(args.dataset)

    # The one line: here after the model is loaded, which makes no difference
    if not args.no_ap:
        torch.moreh.option.enable_advanced_parallelization(devices=args.devices, plan=args.plan)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # --8<-- [end:load]

    train_dataloader = torch.utils.data.DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    progress = Progress(len(train_dataloader), args)
    test_rows = torch.load(Path(args.dataset).with_suffix(".test.pt"))[: args.eval_rows]
    test_dataloader = torch.utils.data.DataLoader(test_rows, batch_size=args.batch_size)

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
