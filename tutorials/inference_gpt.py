#!/usr/bin/env python
"""Lets a model saved by `train_gpt.py` answer instructions.

The saved folder is an ordinary one, so nothing of moreh_ap is needed to use it:

    python tutorials/inference_gpt.py --instruction "Write a Python function `area(r)` to return the area of a circle."
"""

from tutorial_data import PROMPT
from tutorial_evaluation import answer_all

INSTRUCTIONS = (
    "Write a Python function `is_palindrome(text)` to return whether a text reads the same backwards.",
    "Implement `read_lines(path)` in Python. It should read a text file and return its lines without line endings.",
)

if __name__ == "__main__":
    answer_all(__doc__, "train_gpt", "instruction", INSTRUCTIONS, lambda text: PROMPT.format(instruction=text))
