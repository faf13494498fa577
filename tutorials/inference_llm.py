#!/usr/bin/env python
"""Lets a model trained by `train_llm.py` go on with a text.

The saved folder is an ordinary one, so nothing of moreh_ap is needed to use it:

    python tutorials/inference_llm.py --text "### Instruction:"
"""

from tutorial_evaluation import answer_all

TEXTS = ("### Instruction:\nWrite a Python function",)

if __name__ == "__main__":
    answer_all(__doc__, "train_llm", "text", TEXTS, str, "gpt2-embedded/model")
