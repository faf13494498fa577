"""What is compared on the page "by hand or one line": the scripts, how each starts, what it asks of its reader.

Decides which script stands beside which plan, which commands are shown, and which concept is behind each name of
PyTorch's distributed packages. Must not know how scripts are run or compared, nor what is said of them
(`manual_words.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

FOLDER = "tutorials/manual"
SINGLE = f"{FOLDER}/train_single.py"
ONE_LINE = f"{FOLDER}/train_one_line.py"
TORCHRUN = "torchrun --standalone --nproc-per-node"


@dataclass(frozen=True)
class Counterpart:
    """A script by hand.

    Attributes:
        name: The file is `train_<name>.py`; `scripts/bench_overhead.py` calls it so too.
        plan: The same for the one line.
        commands: How it is started; the lines of one start at the same time. Tests run them, with small sizes added.
        files: What it needs besides, and the script for one device does not.
    """

    name: str
    plan: str
    commands: tuple[tuple[str, ...], ...]
    files: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """From the root of the repository."""
        return f"{FOLDER}/train_{self.name}.py"


SINGLE_COMMAND = f"python {SINGLE}"
ONE_LINE_COMMAND = f"python {ONE_LINE} --plan replicate=2"
ON_EACH_NODE = (
    f"torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:29400 {FOLDER}/train_ddp.py"
)

COUNTERPARTS = (
    Counterpart("ddp", "replicate=2", ((f"{TORCHRUN} 2 {FOLDER}/train_ddp.py",), (ON_EACH_NODE, ON_EACH_NODE))),
    Counterpart("fsdp", "shard=2", ((f"{TORCHRUN} 2 {FOLDER}/train_fsdp.py",),)),
    Counterpart("tp", "tensor=2", ((f"{TORCHRUN} 2 {FOLDER}/train_tp.py",),)),
    Counterpart(
        "pp",
        "pipeline=2,micro_batches=4,schedule=1f1b",
        ((f"{TORCHRUN} 2 {FOLDER}/train_pp.py --micro-batches 4 --schedule 1f1b",),),
    ),
    Counterpart(
        "3d",
        "shard=2,tensor=2,pipeline=2,micro_batches=2,schedule=1f1b",
        ((f"{TORCHRUN} 8 {FOLDER}/train_3d.py --pipeline 2 --tensor 2",),),
    ),
    Counterpart(
        "deepspeed", "shard=2", ((f"{TORCHRUN} 2 {FOLDER}/train_deepspeed.py",),), files=(f"{FOLDER}/ds_config.json",)
    ),
)

# What has to be understood to use a name, by what `manual_words.py` calls it.
CONCEPTS = {  # a name of PyTorch's distributed packages or of DeepSpeed
    "torch.distributed.init_process_group": "groups",
    "torch.distributed.destroy_process_group": "groups",
    "torch.distributed.ProcessGroup": "groups",
    "torch.distributed.group.WORLD": "groups",
    "torch.distributed.all_reduce": "collectives",
    "torch.distributed.gather_object": "collectives",
    "torch.distributed.checkpoint.state_dict.StateDictOptions": "state_dicts",
    "torch.distributed.checkpoint.state_dict.get_model_state_dict": "state_dicts",
    "torch.distributed.device_mesh.DeviceMesh": "mesh",
    "torch.distributed.device_mesh.init_device_mesh": "mesh",
    "torch.distributed.fsdp.MixedPrecisionPolicy": "dtypes",
    "torch.distributed.fsdp.fully_shard": "units",
    "torch.distributed.pipelining.PipelineStage": "stages",
    "torch.distributed.pipelining.Schedule1F1B": "schedules",
    "torch.distributed.pipelining.ScheduleGPipe": "schedules",
    "torch.distributed.pipelining.ScheduleInterleaved1F1B": "schedules",
    "torch.distributed.tensor.DTensor": "dtensor",
    "torch.distributed.tensor.Replicate": "dtensor",
    "torch.distributed.tensor.Shard": "dtensor",
    "torch.distributed.tensor.parallel.ColwiseParallel": "products",
    "torch.distributed.tensor.parallel.RowwiseParallel": "products",
    "torch.distributed.tensor.parallel.ParallelStyle": "products",
    "torch.distributed.tensor.parallel.parallelize_module": "products",
    "torch.distributed.tensor.parallel.PrepareModuleInput": "layouts",
    "torch.distributed.tensor.parallel.SequenceParallel": "positions",
    "torch.distributed.tensor.parallel.loss_parallel": "split_loss",
    "torch.nn.parallel.DistributedDataParallel": "wrapper",
    "deepspeed.init_distributed": "groups",
    "deepspeed.initialize": "engine",
    "deepspeed.zero.GatheredParameters": "state_dicts",
}
METHODS = {  # the same for methods, whose object cannot be seen in the source
    "no_sync": "last_sum",
    "set_requires_gradient_sync": "last_sum",
    "full_tensor": "dtensor",
    "to_local": "dtensor",
    "get_local_rank": "mesh",
    "get_group": "mesh",
}
VARIABLES = {"RANK": "ranks", "LOCAL_RANK": "ranks", "WORLD_SIZE": "ranks"}  # of the environment, set by torchrun
