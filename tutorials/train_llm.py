"""Trains a language model from random weights: the standard script for one GPU, with logs, timers and checkpoints.

    python tutorials/train_llm.py --experiment-name gpt2-alpaca    # a GPT-2 on tatsu-lab/alpaca, from the hub
    python tutorials/train_llm.py --embedded                       # a smaller one on Python functions, no hub needed

Started again with the same `--experiment-name`, it continues from the last checkpoint as if it had never stopped.
"""

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
from pathlib import Path

import torch
import tutorial_helpers as helpers
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator

# By name: a prefix such as "HF_" would put a token into the log.
SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "MOREH_CHECK", "MOREH_LOG_LEVEL", "MOREH_NUM_DEVICES",
    "MOREH_STRICT", "OMP_NUM_THREADS",
)

def main():
    # --8<-- [start:flags]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter, allow_abbrev=False)
    parser.add_argument("--embedded", action="store_true", help="prepared model and data, sizes for two CPU cores")
    parser.add_argument("--experiment-name", required="--embedded" not in sys.argv,
                        help="folder in --save-path; a run continues from the checkpoint in it")
    parser.add_argument("--model", "--model-name", default="openai-community/gpt2", help="hub name or folder")
    parser.add_argument("--dataset", "--dataset-name", default="tatsu-lab/alpaca", help="hub name or folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the parameters")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step, over all devices together")
    parser.add_argument("--block-size", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=3e-5, help="learning rate")
    parser.add_argument("--epoch", "--num-epochs", "--num-train-epochs", type=int, default=100, help="passes over data")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the rows, and of dropout")
    parser.add_argument("--log-interval", "--log-freq", type=int, default=100, help="steps between lines of progress")
    parser.add_argument("--ckpt-freq", type=int, default=500, help="steps between two checkpoints")
    parser.add_argument("--save-path", "--save-dir", default="outputs/train_llm", help="folder of all experiments")
    parser.add_argument("--wandb", action="store_true", help="log to Weights & Biases too, as one run")
    parser.add_argument("--devices", type=int, help="how many to use; None: all")
    parser.add_argument("--plan", help='parallel plan, such as "replicate=2"; None: chosen for you')
    parser.add_argument("--no-ap", action="store_true", help="leave the one line out: one GPU, or one CPU process")
    if "--embedded" in sys.argv:
        parser.set_defaults(experiment_name="gpt2-embedded", model="gpt2-small-config", dataset="python-functions")
        parser.set_defaults(block_size=128, lr=1e-3, epoch=1, max_steps=100, log_interval=10, ckpt_freq=50)
    args = helpers.parse_arguments(parser)
    # --8<-- [end:flags]

    # --8<-- [start:load]
    logging.basicConfig(format="[%(asctime)s] %(levelname)s:%(message)s", level=logging.INFO)
    logging.info({name: os.environ[name] for name in SHOWN_VARIABLES if name in os.environ})
    logging.info(args)
    # The one line
    if not args.no_ap:
        torch.moreh.option.enable_advanced_parallelization(devices=args.devices, plan=args.plan)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(args.model, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    dataset = helpers.tokenize_and_group(helpers.load_rows(args.dataset)["train"], tokenizer, args.block_size)
    dataloader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True,
                            collate_fn=default_data_collator, generator=torch.Generator())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000, eta_min=args.lr * 1e-2)
    # --8<-- [end:load]
    num_batches = len(dataloader)
    logging.info(f"{model.num_parameters():,} parameters in {args.dtype}")
    logging.info(f"{len(dataset)} blocks of {args.block_size} tokens, {num_batches} batches an epoch")
    if num_batches < 1:
        raise SystemExit(f"{len(dataset)} blocks do not fill one batch of {args.batch_size}; lower --batch-size")

    # --8<-- [start:resume]
    exp_dir = Path(args.save_path, args.experiment_name)
    saved = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    state = {"epoch": 0, "global_step": 0, "running_loss": 0.0, "logged_losses": []}
    state |= helpers.load_checkpoint(exp_dir, **saved)  # nothing in a new folder
    if state["global_step"]:
        logging.info(f"Resumed from step {state['global_step']}")
    # --8<-- [end:resume]
    run = helpers.start_wandb(args, exp_dir, state["global_step"] > 0, dataloader)

    # --8<-- [start:loop]
    model.train()
    timers = {"data": [], "forward": [], "backward": [], "update": []}  # milliseconds
    first_step, all_steps = state["global_step"], args.epoch * num_batches
    for step in range(first_step, min(args.max_steps or all_steps, all_steps)):
        epoch, epoch_step = divmod(step, num_batches)
        if step == first_step or epoch_step == 0:  # the order of an epoch's rows depends on its number alone
            dataloader.generator.manual_seed(args.seed + epoch)
            batches = itertools.islice(dataloader, epoch_step, None)
        torch.manual_seed(args.seed + step)  # and dropout on the number of the step

        with helpers.timed(timers["data"]), torch.no_grad():
            batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
        with helpers.timed(timers["forward"]):
            outputs = model(**batch)
        with helpers.timed(timers["backward"]):
            optimizer.zero_grad(set_to_none=True)
            outputs.loss.backward()
        with helpers.timed(timers["update"]):
            optimizer.step()
            lr_scheduler.step()

        state |= {"epoch": epoch, "global_step": step + 1}
        state["running_loss"] += outputs.loss.item()
        if state["global_step"] % args.log_interval == 0:
            times = {f"time/{name}": statistics.fmean(durations) for name, durations in timers.items()}
            total_ms = sum(times.values())
            info = {"global_step": step + 1, "epoch": epoch, "epoch_progress": (epoch_step + 1) / num_batches,
                    "num_batches_remaining": num_batches - epoch_step - 1, "lr": lr_scheduler.get_last_lr()[0],
                    "running_loss": state["running_loss"] / args.log_interval, **helpers.memory_stats()}
            info |= times | {"time/total": total_ms, "tokens_per_s": 1e3 * args.batch_size * args.block_size / total_ms}
            logging.info({name: round(value, 6) for name, value in info.items()})
            run.log(info, step=step + 1)
            state["logged_losses"].append(info["running_loss"])
            state["running_loss"] = 0.0
            timers = {name: [] for name in timers}
        if state["global_step"] % args.ckpt_freq == 0:
            logging.info(f"Saving checkpoint of step {state['global_step']}")
            helpers.save_checkpoint(exp_dir, state, **saved)
    # --8<-- [end:loop]

    model.save_pretrained(exp_dir / "model")
    tokenizer.save_pretrained(exp_dir / "model")
    (exp_dir / "losses.json").write_text(json.dumps(state["logged_losses"]) + "\n")
    logging.info(f"Model saved to {exp_dir / 'model'}")
    run.finish()


if __name__ == "__main__":
    main()
