"""The fragments of a public guide to training on one GPU in their order, with local folders in place of names."""

import argparse
import json
import logging
import os
import time
from pathlib import Path

import torch
import wandb
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator

LOGGER = logging.getLogger(__name__)


class LocalTimer:
    def __init__(self, device):
        self.device, self.measurements, self.start_time = device, [], None

    def __enter__(self):
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        self.start_time = time.time()
        return self

    def __exit__(self, kind, value, traceback):
        if traceback is None:
            if self.device.type != "cpu":
                torch.cuda.synchronize(self.device)
            self.measurements.append(time.time() - self.start_time)
        self.start_time = None

    def avg_elapsed_ms(self):
        return 1000 * (sum(self.measurements) / len(self.measurements))

    def reset(self):
        self.measurements = []


def main():
    parser = _get_parser()
    args = parser.parse_args()

    logging.basicConfig(
        format=f"[%(asctime)s] %(levelname)s:%(message)s",  # noqa: F541
        level=logging.INFO,
    )

    LOGGER.info(os.environ)
    LOGGER.info(args)

    torch.moreh.option.enable_advanced_parallelization()
    device = torch.device("cuda")
    dtype = torch.bfloat16

    torch.manual_seed(args.seed)

    config = AutoConfig.from_pretrained(args.model_name, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype).to(device)

    train_data = _load_and_preprocess_data(args)

    dataloader = DataLoader(
        train_data,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=default_data_collator,
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000, eta_min=args.lr * 1e-2)

    exp_dir: Path = Path(args.save_dir) / args.experiment_name

    state = {
        "epoch": 0,
        "global_step": 0,
        "epoch_step": 0,
        "running_loss": 0,
    }
    resumed = False
    if (exp_dir / "state.json").exists():
        model.load_state_dict(_load_to_device(exp_dir / "model.pt", device))
        optimizer.load_state_dict(_load_to_device(exp_dir / "optimizer.pt", device))
        lr_scheduler.load_state_dict(_load_to_device(exp_dir / "lr_scheduler.pt", device))
        with open(exp_dir / "state.json") as fp:
            state = json.load(fp)
        resumed = True

    exp_dir.mkdir(parents=True, exist_ok=True)

    wandb.init(
        project="distributed-training-guide",
        dir=exp_dir,
        name=args.experiment_name,
        id=args.experiment_name,
        resume="must" if resumed else None,
        save_code=True,
        config={
            "args": vars(args),
            "training_data_size": len(train_data),
            "num_batches": len(dataloader),
        },
    )

    timers = {k: LocalTimer(device) for k in ["data", "forward", "backward", "update"]}

    for state["epoch"] in range(args.num_epochs):
        batches = iter(dataloader)

        for i_step in range(len(dataloader)):
            # Here we measure the time it takes to generate a batch and move it to the GPU
            with timers["data"], torch.no_grad():
                batch = next(batches)
                batch = {k: v.to(device=device) for k, v in batch.items()}

            with timers["forward"]:
                outputs = model(**batch)

            with timers["backward"]:
                # NOTE: set_to_none=True will de-allocate the gradients, saving us some memory.
                optimizer.zero_grad(set_to_none=True)
                outputs.loss.backward()

            with timers["update"]:
                optimizer.step()
                lr_scheduler.step()

            state["global_step"] += 1
            state["epoch_step"] += 1
            state["running_loss"] += outputs.loss.item()

            if state["global_step"] % args.log_freq == 0:
                info = {
                    "global_step": state["global_step"],
                    "lr": lr_scheduler.get_last_lr()[0],
                    "running_loss": state["running_loss"] / args.log_freq,
                    "epoch": state["epoch"],
                    "epoch_progress": state["epoch_step"] / len(dataloader),
                    "num_batches_remaining": len(dataloader) - i_step,
                    "time/total": sum(t.avg_elapsed_ms() for t in timers.values()),
                    **{f"time/{k}": timer.avg_elapsed_ms() for k, timer in timers.items()},
                }

                LOGGER.info(info)
                wandb.log(info, step=state["global_step"])
                print(f"loss {info['running_loss']:.6f}", flush=True)

                state["running_loss"] = 0
                for t in timers.values():
                    t.reset()

            if state["global_step"] % args.ckpt_freq == 0:
                LOGGER.info("Saving checkpoint.")
                torch.save(optimizer.state_dict(), exp_dir / "optimizer.pt")
                torch.save(model.state_dict(), exp_dir / "model.pt")
                torch.save(lr_scheduler.state_dict(), exp_dir / "lr_scheduler.pt")
                with open(exp_dir / "state.json", "w") as fp:
                    json.dump(state, fp)

        state["epoch_step"] = 0


def _load_to_device(path, device):
    return torch.load(path, map_location=device, weights_only=True)


def _load_and_preprocess_data(args):
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    data = load_dataset(args.dataset_name, split="train")

    def tokenize(rows):
        found = tokenizer(rows["output"], padding="max_length", max_length=48, truncation=True)
        return {"input_ids": found["input_ids"], "labels": found["input_ids"]}

    tokenizer.pad_token = tokenizer.eos_token
    return data.map(tokenize, batched=True, remove_columns=data.column_names)


def _get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiment-name", default=None, required=True)
    parser.add_argument("--dataset-name", default="./instructions")
    parser.add_argument("--model-name", default="./gpt")
    parser.add_argument("--save-dir", default="./outputs")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--num-epochs", default=100, type=int)
    parser.add_argument("--lr", default=3e-3, type=float)
    parser.add_argument("--batch-size", default=4, type=int)
    parser.add_argument("--log-freq", default=1, type=int)
    parser.add_argument("--ckpt-freq", default=5, type=int)
    return parser


if __name__ == "__main__":
    main()
