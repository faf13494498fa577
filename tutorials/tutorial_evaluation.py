"""What a model does before and after training: the loss of held-out rows, and answers to prompts.

Decides how both are taken. Knows nothing of how a model is trained or where it computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


@torch.no_grad()
def held_out_loss(model: Any, dataloader: Iterable[dict[str, torch.Tensor]], device: str) -> float:
    """Returns the mean loss per token of all rows, prints it, and leaves the model ready to train."""
    model.eval()
    losses, counts = [], []
    for batch in dataloader:
        input_ids_BT, mask_BT = batch["input_ids"], batch["attention_mask"]
        labels_BT = input_ids_BT.masked_fill(mask_BT == 0, -100)
        outputs = model(
            input_ids_BT.to(device),
            attention_mask=mask_BT.to(device),
            labels=labels_BT.to(device),
            use_cache=False,
        )
        losses.append(outputs[0])
        counts.append((labels_BT[:, 1:] != -100).sum().item())
    model.train()
    mean = sum(loss.item() * count for loss, count in zip(losses, counts)) / sum(counts)
    print(f"held-out loss: {mean:.4f}", flush=True)
    return mean


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """Returns what the model writes after `prompt`, the most likely token each time."""
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def answer_all(
    description: str,
    trained_by: str,
    flag: str,
    defaults: tuple[str, ...],
    form: Callable[[str], str],
    inside: str = "",
) -> None:
    """Runs an inference script: loads a saved folder, answers each prompt, prints the answers.

    Args:
        description: What `--help` begins with.
        trained_by: The training script, without `.py`; its result lies in `outputs` under this name.
        flag: Name of the argument that gives what to answer.
        defaults: What is answered without that argument.
        form: Makes the prompt.
        inside: Where in that folder the model lies.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path("outputs") / trained_by / inside
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, default=folder, help="folder of the saved model (%(default)s)")
    parser.add_argument(f"--{flag}", action="append", dest="asked", metavar="TEXT",
                        help="what to answer; may be given more than once")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer (%(default)s)")
    args = parser.parse_args()
    if not args.model_path.is_dir():
        parser.error(f"{args.model_path} does not exist; train first: python tutorials/{trained_by}.py --embedded")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_path).to(device)
    for asked in args.asked or defaults:
        print(f">>> {asked}\n{answer(model, tokenizer, form(asked), args.max_new_tokens)}\n")
