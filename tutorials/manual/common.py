"""What the scripts of this folder share: flags, model, batches, and the report of one run.

Decides that all of them train the same model on the same tokens for the same steps and count time in the same way.
Must not know how a script spreads its work: no process group, no mesh, no accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

EMPTY = "empty"
LLAMA = "llama"
HEAD_SIZE = 64


@dataclass
class Report:
    """One run of one script, as its JSON file holds it.

    Attributes:
        num_parameters: Of the whole model.
        script: Name of the script.
        losses: Loss of each step, the mean over the global batch.
        norms: Norm of the whole gradient of each step, before clipping.
        step_s: Seconds of each step, from one finished step to the next.
        ready_s: Seconds from the start of the process to the start of the first step, where `BENCH_STARTED_AT` is set.
        first_step_s: The same to the end of the first step.
    """

    num_parameters: int
    script: str = field(default_factory=lambda: Path(sys.argv[0]).stem)
    losses: list[float] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    ready_s: float | None = None
    first_step_s: float | None = None

    def write(self, path: Path | None) -> None:
        """Writes the report as JSON to `path`, if there is one; only here are the norms read from the device."""
        if path is not None:
            values = vars(self) | {"norms": [float(norm) for norm in self.norms]}
            path.write_text(json.dumps(values, indent=2) + "\n")


def save_weights(state: dict[str, torch.Tensor], path: Path | None) -> None:
    """Writes the state dict of the whole model to `path`, if there is one, as one device would have saved it."""
    if path is not None:
        torch.save({name: tensor.cpu() for name, tensor in state.items()}, path)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all scripts take; a script adds its own and calls `parse_arguments`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="decoder layers")
    parser.add_argument("--hidden", type=int, default=512, help=f"hidden size, a multiple of {HEAD_SIZE}")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=16, help="global batch: sequences over all devices")
    parser.add_argument("--block-size", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--micro-batches", type=int, default=1, help="pieces of a device's rows, one after another")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--epsilon", type=float, default=1e-8, help="of AdamW; a large one shows gradients' scale")
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip the gradient of the whole model to this norm")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep and update weights in float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="where to write the trained weights, all of them in one file")
    parser.add_argument("--json", type=Path, help="where to write losses, gradient norms and seconds of each step")
    return parser


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, for scripts that can train any module and not only a Llama."""
    parser.add_argument("--model", choices=(LLAMA, EMPTY), default=LLAMA, help="empty: one nn.Linear(1, 1)")


def parse_arguments(
    parser: argparse.ArgumentParser, torchrun: bool = False, data_parallel: bool = False
) -> argparse.Namespace:
    """Returns the command line, or ends the program where it contradicts itself.

    Args:
        parser: From `argument_parser`.
        torchrun: The script runs as several processes. Where torchrun has not started it, the program ends.
        data_parallel: Every process has a slice of the global batch.
    """
    args = parser.parse_args()
    if args.hidden % HEAD_SIZE:
        parser.error(f"--hidden is {args.hidden}; it must be a multiple of {HEAD_SIZE}, the size of a head")
    if torchrun and "RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    check_batch(parser, args, int(os.environ["WORLD_SIZE"]) if data_parallel else 1)
    return args


def check_batch(parser: argparse.ArgumentParser, args: argparse.Namespace, data_parallel: int) -> None:
    """Ends the program if the batch cannot be cut into equal pieces, whose mean losses may be averaged."""
    if args.micro_batches < 1 or args.batch_size % (data_parallel * args.micro_batches):
        parser.error(
            f"--batch-size is {args.batch_size}; it must be a multiple of {data_parallel} devices that share the batch"
            f" x {args.micro_batches} micro-batches"
        )


class EmptyModel(torch.nn.Module):
    """A model without work: what a step of it takes is what the machinery around it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        """Returns the loss alone, as a tuple, from the first token of each sequence."""
        return (self.linear(input_ids[:, :1].float()).square().mean(),)


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """Returns the model of the flags in float32, with the weights that `--seed` gives.

    The Llama has no dropout, and its head is not tied to its embedding: `LlamaConfig` has both so by default.
    """
    torch.manual_seed(args.seed)
    if getattr(args, "model", LLAMA) == EMPTY:
        return EmptyModel()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD_SIZE,
        num_key_value_heads=args.hidden // HEAD_SIZE,
        max_position_embeddings=max(2048, args.block_size),
        attention_dropout=0.0,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_batches(args: argparse.Namespace) -> list[torch.Tensor]:
    """Returns the global batch of each step: random tokens of shape (batch, block)."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.batch_size, args.block_size)
    return [torch.randint(0, args.vocabulary, shape, generator=generator) for _ in range(args.steps)]


def count_parameters(model: torch.nn.Module) -> int:
    """Returns the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


class Clock:
    """Takes the times of a run for its report, and prints a line a step."""

    def __init__(self, report: Report, prints: bool) -> None:
        """Starts counting.

        Args:
            report: Where losses and seconds are noted.
            prints: Whether this process is the one that prints.
        """
        self._report = report
        self._prints = prints
        self._last_s = time.perf_counter()
        report.ready_s = seconds_since_start()

    def step_ended(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Notes the end of a step; reading `loss` here makes sure that the step has ended."""
        self._report.losses.append(float(loss))
        self._report.norms.append(norm)
        now_s = time.perf_counter()
        self._report.step_s.append(now_s - self._last_s)
        self._last_s = now_s
        if self._report.first_step_s is None:
            self._report.first_step_s = seconds_since_start()
        if self._prints:
            step, step_s = len(self._report.losses), self._report.step_s[-1]
            print(f"step {step}: loss {self._report.losses[-1]:.6f}, {step_s:.3f} s", flush=True)


def seconds_since_start() -> float | None:
    """Returns the seconds since `BENCH_STARTED_AT` (Unix time, set by who started the process), or None without it."""
    started_at = os.environ.get("BENCH_STARTED_AT")
    return None if started_at is None else time.time() - float(started_at)
