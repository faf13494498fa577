#!/usr/bin/env python
"""Lets a model saved by `train_gpt.py` answer instructions.

The saved folder is an ordinary one, so nothing of ours is needed to use it:

    python tutorials/inference_gpt.py --instruction "Write a Python function `area(r)` to return the area of a circle."
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from tutorial_data import PROMPT

DEFAULT_INSTRUCTIONS = (
    "Write a Python function `is_palindrome(text)` to return whether a text reads the same backwards.",
    "Implement `read_lines(path)` in Python. It should read a text file and return its lines without line endings.",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, default=Path("outputs/train_gpt"), help="folder of the saved model")
    parser.add_argument("--instruction", action="append", help="what to write; may be given more than once")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    if not args.model_path.is_dir():
        parser.error(f"{args.model_path} does not exist; train first: python tutorials/train_gpt.py --embedded")
    return args


def main() -> None:
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_path).to(device).eval()

    for instruction in args.instruction or DEFAULT_INSTRUCTIONS:
        inputs = tokenizer(PROMPT.format(instruction=instruction), return_tensors="pt").to(device)
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False,
                                    pad_token_id=tokenizer.pad_token_id)  # fmt: skip
        answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f">>> {instruction}\n{answer.strip()}\n")


if __name__ == "__main__":
    main()
