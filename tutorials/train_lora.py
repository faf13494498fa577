"""Trains adapters (LoRA) of a frozen 7B: a plain script for one device, and one line that makes it many.

    python tutorials/train_lora.py                # Mistral-7B on Evol-Instruct-Python-26k, from the hub
    python tutorials/train_lora.py --embedded     # a small model and data set prepared on this machine, no hub needed
"""

import argparse
import sys

# --8<-- [start:imports]
import torch
import tutorial_helpers as helpers
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

# --8<-- [end:imports]

SAMPLE = "Write a Python function `count_vowels(text)` to return the number of vowels of it."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter, allow_abbrev=False)
    parser.add_argument("--embedded", action="store_true", help="prepared model and data, sizes for two CPU cores")
    parser.add_argument("--model", "--model-name", default="mistralai/Mistral-7B-v0.3", help="hub name or folder")
    parser.add_argument("--dataset", "--dataset-name", default="mlabonne/Evol-Instruct-Python-26k", help="the same")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step, over all devices together")
    parser.add_argument("--block-size", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--epoch", "--num-epochs", "--num-train-epochs", type=int, default=1, help="passes over data")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the rows, and of dropout")
    parser.add_argument("--log-interval", "--log-freq", type=int, default=10, help="steps between lines of progress")
    parser.add_argument("--eval-rows", type=int, default=256, help="held-out rows whose loss is taken; 0: none")
    parser.add_argument("--sample-tokens", type=int, default=64, help="length of the answer to one prompt; 0: none")
    parser.add_argument("--save-path", "--save-dir", default="outputs/train_lora", help="folder for the result")
    parser.add_argument("--devices", type=int, help="how many to use; None: all")
    parser.add_argument("--plan", help='parallel plan, such as "replicate=2"; None: chosen for you')
    parser.add_argument("--no-ap", action="store_true", help="leave the one line out: one GPU, or one CPU process")
    if "--embedded" in sys.argv:
        parser.set_defaults(model="smollm2-135m-instruct", dataset="python-functions", batch_size=8, block_size=96)
        parser.set_defaults(lr=1e-3, rank=8, max_steps=20, eval_rows=32, log_interval=2)
    args = helpers.parse_arguments(parser)
    torch.manual_seed(args.seed)

    # --8<-- [start:load]
    # The one line
    if not args.no_ap:
        torch.moreh.option.enable_advanced_parallelization(devices=args.devices, plan=args.plan)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32 if args.embedded else torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # --8<-- [end:load]

    # --8<-- [start:adapters]
    config = LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    model = get_peft_model(model, config)
    model.print_trainable_parameters()
    # --8<-- [end:adapters]

    # --8<-- [start:data]
    rows = helpers.load_rows(args.dataset, ("instruction", "output"), args.eval_rows)
    dataset = helpers.tokenize(rows, helpers.instruction_tokens, tokenizer, args.block_size)
    train_dataloader = DataLoader(dataset["train"], batch_size=args.batch_size, shuffle=True, drop_last=True)
    # --8<-- [end:data]
    progress = helpers.Progress(len(train_dataloader), args)
    prompt = helpers.PROMPT.format(instruction=SAMPLE)
    sample_before = helpers.answer(model, tokenizer, prompt, args.sample_tokens)
    model.to(device)
    loss_before = helpers.held_out_loss(model, dataset["test"], args.batch_size, device)

    # --8<-- [start:loop]
    model.train()
    optim = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    for epoch in range(args.epoch):
        for batch in train_dataloader:
            if progress.done:
                break
            input_ids, attn_mask = batch["input_ids"], batch["attention_mask"]
            labels = input_ids.masked_fill(attn_mask == 0, -100)  # pads are no part of the loss
            outputs = model(input_ids.to(device), attention_mask=attn_mask.to(device),
                            labels=labels.to(device), use_cache=False)
            loss = outputs[0]
            loss.backward()
            optim.step()
            model.zero_grad(set_to_none=True)
            progress.step(epoch, loss, input_ids.numel())
    # --8<-- [end:loop]

    loss_after = helpers.held_out_loss(model, dataset["test"], args.batch_size, device)
    # --8<-- [start:save]
    model.to("cpu")
    model.save_pretrained(args.save_path)  # the adapters alone, a few megabytes
    tokenizer.save_pretrained(args.save_path)
    # --8<-- [end:save]
    progress.save(args.save_path, loss_before, loss_after)
    if args.sample_tokens:
        sample_after = helpers.answer(model, tokenizer, prompt, args.sample_tokens)
        print(f"\n>>> {prompt}--- before\n{sample_before}\n--- after\n{sample_after}")


if __name__ == "__main__":
    main()
