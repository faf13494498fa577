"""The words of docs/manual-or-one-line.md: what a language of the site has to say, and the English.

Decides how the page reads. Must not know figures, scripts or plans. A text of the page has blanks, which
`compare_manual.py` fills. Headings of another language than English carry the English anchor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """What is said of a script by hand.

    Attributes:
        title: Its section's.
        shared: What the devices share.
        goes_wrong: What goes wrong by hand and cannot with the one line, each in a sentence or two.
        note: What else is to be said.
    """

    title: str
    shared: str
    goes_wrong: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Words:
    """A language.

    Attributes:
        page: The texts of the page, by what they are.
        scripts: By name of the counterpart.
        concepts: What a reader has to know, by the name it has in `manual_counterparts.py`.
    """

    page: dict[str, str]
    scripts: dict[str, About]
    concepts: dict[str, str]


_STATE_TOO = "the batch, and parameters, gradients and optimizer state"

ENGLISH = Words(
    page={
        "head": """\
# By hand or with one line

<!-- Written by scripts/compare_manual.py from tutorials/manual and reference/manual.json. Change those. -->

![{chart}](assets/charts/compare.svg){{ .wide }}
![{chart}](assets/charts/compare-narrow.svg){{ .narrow }}

We wrote one training three ways: for one device, with the one line, and by hand for each kind of parallelism. The \
one line adds {lines} lines. A script by hand adds {fewest} to {most}, and up to {concepts} concepts of distributed \
training that its reader has to know. All of them print the losses of one device.

| script | lines | concepts | losses differ by | step time, one line / by hand |
|---|---|---|---|---|
{rows}

The training is a small Llama with AdamW, accumulation, clipping by the norm of the full gradient, and one file of \
weights that loads on one device. Scripts are compared with `{single}`, which knows of one device.

- *Lines*: lines of code added and removed, without comments, docstrings and blank lines.
- *Concepts*: what a reader has to know, one or more for each name of PyTorch's distributed packages, or of DeepSpeed, \
that a script uses.
- *Losses differ by*: the largest relative difference of any step, of this script and of the one line under the same \
plan, from `{single_name}`.
- *Step time*: below 1 the one line is faster; the median over pairs of runs, then the interval that \
[Measured](benchmarks.md) explains. It is of a wider model (`--hidden 384`, all at once `--hidden 256`).

??? note "The runs that the losses are from"

{how}

    To measure again: `make compare MEASURE=--measure`.
""",
        "one_line": """\
## The one line {{ #one-line }}

{commands}

The first command runs the script for one device, the second the same script with the line. The flag `--plan` makes \
it comparable with the scripts below; without the flag, the planner chooses. `mixed_precision` follows `--bf16`, so \
that the numbers are those of one device.
""",
        "chart": "Lines to add, concepts to know and step time of the one line and of six scripts by hand",
        "plan": 'Devices share {shared}. For the one line the same is `plan="{plan}"`.',
        "by_hand": "By hand",
        "with_line": "With one line",
        "speed": "x{median:.2f} ({low:.2f} to {high:.2f}; {num_pairs} pairs)",
        "unknown": "not measured",
        "machine": "{cores} cores ({processor}), {memory_gib} GiB, CPU workers",
        "places": "Or, for {num_places} machines, once on each:",
        "know": "A reader has to know:",
        "wrong": "What goes wrong by hand, and cannot with the one line:",
        "borrowed": "It imports {num_lines} lines from {files}, which count as added.",
        "and": " and ",
        "file": "`{name}`, whose lines count as added:",
    },
    scripts={
        "ddp": About(
            "Data parallel: DistributedDataParallel",
            "the batch; each holds the full model",
            (
                "A script that does not cut the batch trains on it once for each process, or on a batch so many "
                "times as large as before. Nothing fails; the learning rate no longer fits.",
                "The mean of the processes' means is the mean over the batch only if all have the same number of "
                "tokens, as here. With padded rows each loss has to be divided by the tokens of all processes, and "
                "multiplied by the number of processes, which DDP divides by.",
                "A loss that is not divided by the number of micro-batches makes gradients as many times too large. "
                "Without `no_sync` every micro-batch is summed over the devices: right, and slower.",
                "Every process prints, logs and saves unless it is told not to. But a call that communicates, "
                "inside `if rank == 0:`, waits for processes that never come.",
                'The state dict of the wrapper has "module." before every name.',
            ),
            "On two machines, write the address of one of them in place of `localhost`; both need the same files, the "
            "same versions and an open port. You can also try it in two terminals of one machine. With the one line "
            "you start the script once and [name the hosts](several-machines.md).",
        ),
        "fsdp": About(
            "Sharded: FSDP2",
            _STATE_TOO,
            (
                "An optimizer made before `fully_shard` keeps the old parameters: its steps change nothing, without "
                "an error.",
                "`fully_shard` on the model alone, not on its layers, gathers the full model at once: right, and "
                "no memory is saved while it computes.",
                "`model.state_dict()` has shards of tensors. The code that gathers them communicates, and all "
                "processes have to call it.",
                "The norm that `clip_grad_norm_` returns is a DTensor; what logs it needs `full_tensor()`, on all "
                "devices.",
                "Each process makes the full model before it keeps its shards. For a model that is too large for "
                "that, the script needs a meta device and a loader for slices of checkpoints.",
            ),
        ),
        "tp": About(
            "Tensor parallel",
            "every matrix product",
            (
                "The plan names the modules of one model class. A name that no module has is passed over with a "
                "warning; another model is another plan.",
                "All processes need the same rows. Different ones, as from a `DistributedSampler`, give wrong "
                "numbers and no error.",
                "Some parameters become DTensors and some do not. `clip_grad_norm_` and fused optimizers do not "
                "take both together: the script needs a clipping of its own and groups of parameters.",
                "Layouts between modules are declared and not checked: a norm that is computed from split positions "
                "without such a declaration gets a partial gradient.",
                "The backward has to be inside `loss_parallel()` too, not only the forward.",
            ),
        ),
        "pp": About(
            "Pipeline",
            "the layers, one stage after another",
            (
                "The model is cut by hand, for one model class: who has the embedding, who the head, what travels "
                "between. Embedding and head that share their weights would become two, each trained on its own.",
                "The loss has to be a function that the schedule calls. It divides gradients by the number of "
                "micro-batches itself; a loss that does so too is divided twice.",
                "Only the last device knows the loss, and each device knows the norm of its own stages only.",
                "Each stage counts its layers from 0. A checkpoint for one device needs the names of the full "
                "model, and tensors from all devices.",
                "Evaluation and `generate` need code of their own: no process can call the model.",
            ),
        ),
        "3d": About(
            "All at once: pipeline, shards and tensor axis",
            "layers, products, and the batch with parameters and optimizer state",
            (
                "Everything above, and what each axis divides by: FSDP by the length of its axis, the schedule by "
                "the micro-batches, the tensor axis by nothing. A factor too many is no error.",
                "The order of wrapping is fixed: products first, shards after. So is the order of the axes, if "
                "neighbours on the tensor axis are to be on one machine.",
                "The norm for clipping is summed over shards, over groups of parameters on different meshes, and "
                "over stages.",
                "The batch is cut by one axis and not by the others, and each process has to find its rank on all "
                "of them.",
                "A checkpoint is assembled twice: shards of tensors within a stage, then stages.",
            ),
            "PyTorch warns that sums over two axes are taken one after the other; that is meant so.",
        ),
        "deepspeed": About(
            "Sharded: DeepSpeed",
            _STATE_TOO,
            (
                "The sizes of batch, micro-batch and accumulation stand in a configuration and in the script, and "
                "have to agree.",
                "The engine takes over the loop: `engine.backward` divides the loss by the micro-batches, and "
                "`engine.step` is called after each of them. A loop that divides too divides twice.",
                "Clipping is a value of the configuration. A `clip_grad_norm_` that was left in the loop sees no "
                "gradients.",
                "Most parameters are empty between steps; a state dict is complete only inside "
                "`GatheredParameters`, which all processes have to enter.",
                "Operations are compiled at the first start, for which the machine needs a compiler.",
            ),
            "DeepSpeed is not installed with this project: `pip install deepspeed`. Without a GPU it compiles one "
            "operation at its first start, which takes about a minute, a C++ compiler and ninja.",
        ),
    },
    concepts={
        "ranks": "rank, local rank, number of processes",
        "groups": "process groups and their backends",
        "collectives": "collectives: all processes call them, in one order",
        "state_dicts": "sharded state dicts",
        "mesh": "device mesh: axes and their order",
        "dtypes": "dtypes of gathering and of reduction",
        "units": "units of sharding; the optimizer comes after them",
        "stages": "stages and what travels between them",
        "schedules": "schedules of micro-batches",
        "dtensor": "DTensor: replicated, sharded and partial tensors",
        "products": "products split by columns and by rows",
        "layouts": "layouts between modules",
        "positions": "positions split between products",
        "split_loss": "loss of split logits",
        "wrapper": "the wrapper around the model and its buckets",
        "engine": "DeepSpeed's engine and its configuration",
        "last_sum": "gradients are summed after the last micro-batch only",
    },
)
