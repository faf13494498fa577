"""Fine-tunes Llama 3 70B to summarise: a plain script for one device, and one line that makes it many.

    python tutorials/train_llama3_70b.py --show-plan  # the plan for 64 devices, beside a published run; starts nothing
    python tutorials/train_llama3_70b.py              # Meta-Llama-3-70B on cnn_dailymail, from the hub
    python tutorials/train_llama3_70b.py --embedded   # a small Llama in 8 stages on 8 CPU workers, no hub needed
"""

import argparse
import sys

# --8<-- [start:imports]
import torch
import tutorial_helpers as helpers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

# --8<-- [end:imports]
from moreh_ap.cli.main import main as moreh_ap

# 32 MI250 of 2 devices each, for which this plan and about 4,062 tokens/s were published
PUBLISHED_TASK = ("Llama3-70B", "--devices", "64xMI250", "--global-batch", "512", "--seq-len", "1024")
PUBLISHED_PLAN = "shard=8,pipeline=8,micro_batches=64,recompute=full,precision=bf16"
# The same in small: 8 stages, two on each of 4 devices, and two devices a shard
SMALL_PLAN = "shard=2,pipeline=4,stages_per_device=2,schedule=interleaved,micro_batches=8,recompute=full"

# --8<-- [start:masks]
# 1 where there is text, 0 where there are pads
def create_mask(input_ids, tokenizer):
    return (input_ids != tokenizer.pad_token_id).long()


# Pads are no part of the loss
def mask_pads(input_ids, tokenizer, ignore_index=-100):
    return input_ids.masked_fill(create_mask(input_ids, tokenizer) == 0, ignore_index)


# --8<-- [end:masks]
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter, allow_abbrev=False)
    parser.add_argument("--embedded", action="store_true", help="prepared model and data, sizes for two CPU cores")
    parser.add_argument("--model", "--model-name", default="meta-llama/Meta-Llama-3-70B", help="hub name or folder")
    parser.add_argument("--dataset", "--dataset-name", default="cnn_dailymail:3.0.0", help="hub name or folder")
    parser.add_argument("--batch-size", type=int, default=512, help="sequences a step, over all devices together")
    parser.add_argument("--block-size", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--epoch", "--num-epochs", "--num-train-epochs", type=int, default=1, help="passes over data")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the rows, and of dropout")
    parser.add_argument("--log-interval", "--log-freq", type=int, default=10, help="steps between lines of progress")
    parser.add_argument("--eval-rows", type=int, default=0, help="held-out rows whose loss is taken; 0: none")
    parser.add_argument("--save-path", "--save-dir", default="outputs/train_llama3_70b", help="folder for the result")
    parser.add_argument("--devices", type=int, help="how many to use; None: all")
    parser.add_argument("--plan", help='parallel plan, such as "replicate=2"; None: chosen for you')
    parser.add_argument("--no-ap", action="store_true", help="leave the one line out: one GPU, or one CPU process")
    parser.add_argument("--show-plan", action="store_true", help="print the planner's and the published plan, and end")
    if "--embedded" in sys.argv:
        parser.set_defaults(model="smollm2-135m-instruct", dataset="docstring-summaries", batch_size=16, block_size=96)
        parser.set_defaults(lr=5e-5, max_steps=6, eval_rows=16, log_interval=1, plan=SMALL_PLAN)
    args = helpers.parse_arguments(parser)
    if args.show_plan:
        moreh_ap(["plan", *PUBLISHED_TASK, "--top", "3"])
        print("\nPublished: 8 stages, 64 micro-batches, full recomputation, sharded; 4,062 tokens/s. Our estimate:\n")
        raise SystemExit(moreh_ap(["plan", *PUBLISHED_TASK, "--compare", PUBLISHED_PLAN]))
    torch.manual_seed(args.seed)

    # --8<-- [start:load]
    # The one line
    if not args.no_ap:
        torch.moreh.option.enable_advanced_parallelization(devices=args.devices, plan=args.plan)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    helpers.set_pad_token(tokenizer)
    # --8<-- [end:load]

    # --8<-- [start:data]
    rows = helpers.load_rows(args.dataset, ("article", "highlights"), args.eval_rows)
    dataset = helpers.tokenize(rows, helpers.summary_tokens, tokenizer, args.block_size)
    train_dataloader = DataLoader(dataset["train"], batch_size=args.batch_size, shuffle=True, drop_last=True)
    # --8<-- [end:data]
    progress = helpers.Progress(len(train_dataloader), args)
    loss_before = helpers.held_out_loss(model, dataset["test"], args.batch_size, device)

    # --8<-- [start:loop]
    model.train()
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epoch):
        for batch in train_dataloader:
            if progress.done:
                break
            input_ids = batch["input_ids"]
            attn_mask, labels = create_mask(input_ids, tokenizer), mask_pads(input_ids, tokenizer)
            outputs = model(input_ids.to(device), attention_mask=attn_mask.to(device),
                            labels=labels.to(device), use_cache=False)
            loss = outputs[0]
            loss.backward()
            optim.step()
            model.zero_grad(set_to_none=True)
            progress.step(epoch, loss, input_ids.numel())
    # --8<-- [end:loop]

    loss_after = helpers.held_out_loss(model, dataset["test"], args.batch_size, device)
    model.save_pretrained(args.save_path)  # an ordinary folder, written while the model is on the workers
    tokenizer.save_pretrained(args.save_path)
    progress.save(args.save_path, loss_before, loss_after)


if __name__ == "__main__":
    main()
