#!/usr/bin/env python
"""Lets a model saved by `train_mistral.py` answer instructions.

The saved folder is an ordinary one, so nothing of moreh_ap is needed to use it:

    python tutorials/inference_mistral.py --instruction "Write a Python function `mean(values)` that returns the mean."
"""

from tutorial_data import PROMPT
from tutorial_evaluation import answer_all

INSTRUCTIONS = (
    "Write a Python function `largest(numbers)` to return the largest of a list of numbers.",
    "Implement `count_words(text)` in Python. It should count how often each word occurs in a text.",
)

if __name__ == "__main__":
    answer_all(__doc__, "train_mistral", "instruction", INSTRUCTIONS, lambda text: PROMPT.format(instruction=text))
