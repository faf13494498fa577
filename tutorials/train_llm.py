#!/usr/bin/env python
"""Trains a language model from random weights: the standard script for one GPU, with logs, timers and checkpoints.

From the root of the repository:

    python tutorials/train_llm.py --experiment-name gpt2-alpaca    # a GPT-2 on tatsu-lab/alpaca, from the hub
    python tutorials/train_llm.py --embedded                       # a smaller one on Python functions, no hub needed

Started again with the same `--experiment-name`, it goes on from the last checkpoint as if it had never stopped.
"""

import argparse
import json
import logging
import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator
from tutorial_arguments import parse_training_arguments
from tutorial_checkpoint import load_checkpoint, save_checkpoint
from tutorial_data import EMBEDDED_CONFIG, EMBEDDED_DATASET, load_rows, tokenize_and_group
from tutorial_timer import PhaseTimer, memory_stats

LOGGER = logging.getLogger(__name__)
PUBLIC = {
    "model": "openai-community/gpt2",
    "dataset": "tatsu-lab/alpaca",
    "batch_size": 8,
    "block_size": 1024,
    "lr": 3e-5,
    "epoch": 100,
    "log_interval": 100,
    "save_path": Path("outputs/train_llm"),
}
EMBEDDED = {
    "experiment_name": "gpt2-embedded",
    "model": EMBEDDED_CONFIG,
    "dataset": EMBEDDED_DATASET,
    "batch_size": 8,
    "block_size": 128,
    "lr": 1e-3,
    "epoch": 1,
    "max_steps": 100,
    "log_interval": 10,
    "ckpt_freq": 50,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("experiment")
    group.add_argument("--experiment-name", help="folder in --save-path; one that has a checkpoint is gone on with")
    group.add_argument("--ckpt-freq", type=int, default=500, help="steps between two checkpoints")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the parameters")
    group.add_argument("--wandb", action="store_true", help="log to Weights & Biases too, as one run")


def main() -> None:
    args = parse_training_arguments(__doc__, PUBLIC, EMBEDDED, add_arguments)
    if args.experiment_name is None:
        raise SystemExit("--experiment-name is missing; it names the folder of this run: --experiment-name gpt2-alpaca")
    logging.basicConfig(format="[%(asctime)s] %(levelname)s:%(message)s", level=logging.INFO)
    LOGGER.info({name: value for name, value in os.environ.items() if name.startswith(("CUDA", "HF_", "MOREH", "OMP"))})
    LOGGER.info(args)

    # --8<-- [start:load]
    # The one line
    if not args.no_ap:
        torch.moreh.option.enable_advanced_parallelization(devices=args.devices, plan=args.plan)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(args.seed)

    config = AutoConfig.from_pretrained(args.model, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    LOGGER.info(f"{model.num_parameters():,} parameters in {args.dtype}")

    train_data = tokenize_and_group(load_rows(args.dataset)["train"], tokenizer, args.block_size)
    order = torch.Generator()
    dataloader = torch.utils.data.DataLoader(
        train_data,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=default_data_collator,
        generator=order,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000, eta_min=args.lr * 1e-2)
    # --8<-- [end:load]
    if len(dataloader) < 1:
        raise SystemExit(f"{len(train_data)} blocks do not fill one batch of {args.batch_size}; lower --batch-size")
    LOGGER.info(f"{len(train_data)} blocks of {args.block_size} tokens, {len(dataloader)} batches an epoch")

    # --8<-- [start:resume]
    exp_dir = args.save_path / args.experiment_name
    exp_dir.mkdir(parents=True, exist_ok=True)
    state = {"epoch": 0, "global_step": 0, "epoch_step": 0, "running_loss": 0.0, "logged_losses": []}
    resumed = (exp_dir / "state.json").exists()
    if resumed:
        state = load_checkpoint(exp_dir, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler)
        LOGGER.info(f"Resumed from step {state['global_step']}")
    # --8<-- [end:resume]
    run = start_wandb(args, exp_dir, resumed, len(train_data), len(dataloader)) if args.wandb else None

    timers = {name: PhaseTimer() for name in ("data", "forward", "backward", "update")}
    last_step = min(args.max_steps or args.epoch * len(dataloader), args.epoch * len(dataloader))

    model.train()
    # --8<-- [start:loop]
    while state["epoch"] < args.epoch and state["global_step"] < last_step:
        order.manual_seed(args.seed + state["epoch"])  # the order of an epoch's rows depends on its number alone
        batches = iter(dataloader)
        for _ in range(state["epoch_step"]):
            next(batches)  # seen before the checkpoint

        while state["epoch_step"] < len(dataloader) and state["global_step"] < last_step:
            torch.manual_seed(args.seed + state["global_step"])  # and so does the dropout of a step

            with timers["data"], torch.no_grad():
                batch = next(batches)
                batch = {name: tensor.to(device) for name, tensor in batch.items()}

            with timers["forward"]:
                outputs = model(**batch)

            with timers["backward"]:
                optimizer.zero_grad(set_to_none=True)
                outputs.loss.backward()

            with timers["update"]:
                optimizer.step()
                lr_scheduler.step()

            state["global_step"] += 1
            state["epoch_step"] += 1
            state["running_loss"] += outputs.loss.item()

            if state["global_step"] % args.log_interval == 0:
                total_ms = sum(timer.mean_ms for timer in timers.values())
                info = {
                    "global_step": state["global_step"],
                    "epoch": state["epoch"],
                    "epoch_progress": state["epoch_step"] / len(dataloader),
                    "lr": lr_scheduler.get_last_lr()[0],
                    "running_loss": state["running_loss"] / args.log_interval,
                    "tokens_per_s": 1000 * args.batch_size * args.block_size / total_ms,
                    "time/total": total_ms,
                    **{f"time/{name}": timer.mean_ms for name, timer in timers.items()},
                    **memory_stats(),
                }
                LOGGER.info({name: round(value, 6) for name, value in info.items()})
                if run is not None:
                    run.log(info, step=state["global_step"])
                state["logged_losses"].append(info["running_loss"])
                state["running_loss"] = 0.0
                for timer in timers.values():
                    timer.reset()

            if state["global_step"] % args.ckpt_freq == 0:
                LOGGER.info(f"Saving checkpoint of step {state['global_step']}")
                save_checkpoint(exp_dir, state, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler)
        if state["epoch_step"] == len(dataloader):
            state["epoch"], state["epoch_step"] = state["epoch"] + 1, 0
    # --8<-- [end:loop]

    model.save_pretrained(exp_dir / "model")
    tokenizer.save_pretrained(exp_dir / "model")
    (exp_dir / "losses.json").write_text(json.dumps(state["logged_losses"]) + "\n")
    LOGGER.info(f"Model saved to {exp_dir / 'model'}")
    if run is not None:
        run.finish()


def start_wandb(args: argparse.Namespace, exp_dir: Path, resumed: bool, num_rows: int, num_batches: int):
    """Returns the run of Weights & Biases with the experiment's name: a new one, or the one that is gone on with."""
    try:
        import wandb
    except ModuleNotFoundError:
        raise SystemExit("--wandb needs the package wandb, which is not installed: pip install wandb") from None
    return wandb.init(
        project="moreh-ap-tutorials",
        dir=exp_dir,
        name=args.experiment_name,
        id=args.experiment_name,
        resume="must" if resumed else None,
        save_code=True,
        config={"args": vars(args), "training_data_size": num_rows, "num_batches": num_batches},
    )


if __name__ == "__main__":
    main()
