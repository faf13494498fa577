"""The private names of other libraries that this package uses: each with the folders that use it, and for what.

They may change in any release. `tests/unit/test_private_names.py` compares the table with the code (by `ast`, with
`scripts/private_uses.py`) and with the installed libraries, and names the row of what is gone. Nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

CHECKED_IN = {"torch": "2.13.0", "transformers": "5.23.0"}
"""The versions in which every name was found. Of torch 2.11 `tests/unit/test_torch_names.py` knows all names."""

GUARDED = frozenset(
    {
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
        "torch._dynamo.eval_frame.OptimizedModule._torchdynamo_orig_callable",
        "torch.jit.ScriptFunction._torchdynamo_inline",
    }
)
"""Names that may be gone, or that not all objects of a class have: the code asks for them first."""


class PrivateName(NamedTuple):
    """A row.

    Attributes:
        name: The full dotted name; of an attribute, with the class whose objects have it.
        folders: Folders of `moreh_ap` with files that use it; "." is `moreh_ap` itself, "*" stands for more than five.
        purpose: What for.
    """

    name: str
    folders: tuple[str, ...]
    purpose: str

    def __str__(self) -> str:
        return f"{self.name} | moreh_ap: {', '.join(self.folders)} | {self.purpose}"


def _names(purpose: str, *rows: tuple[str, str]) -> Iterator[PrivateName]:
    return (PrivateName(name, tuple(folders.split()), purpose) for name, folders in rows)


PRIVATE_NAMES: tuple[PrivateName, ...] = (
    *_names(
        "Tells tensors that share memory.",
        ("torch.Tensor._base", "parallelizer/state session"),
        ("torch.Tensor._is_view", "device parallelizer/data parallelizer/pipeline parallelizer/tensor"),
    ),
    *_names(
        "Tells parameters from tensors: `nn.Parameter` of a subclass has its type.",
        ("torch.nn.Parameter._is_param", "device device/patches parallelizer/precision protocol/objects"),
    ),
    *_names("Makes a tensor without memory.", ("torch.Tensor._make_wrapper_subclass", "device parallelizer/tensor")),
    *_names("Has an RNN list its weights anew.", ("torch.nn.RNNBase._update_flat_weights", "session")),
    *_names("Makes a parameter of a library's class.", ("torch.Tensor._make_subclass", "device/patches")),
    *_names("Notices in-place changes, as autograd does.", ("torch.Tensor._version", "*")),
    *_names("Tells memories apart while a file is written.", ("torch.UntypedStorage._cdata", "device/patches")),
    *_names(
        "Calls PyTorch on tensors of our class without being called back.",
        ("torch._C.DisableTorchFunction", "*"),
        ("torch._C.DisableTorchFunctionSubclass", "*"),
    ),
    *_names(
        "Has views of split tensors made below autograd noticed.",
        ("torch._C.DispatchKey", "parallelizer/data"),
        ("torch._C._SetExcludeDispatchKeyGuard", "parallelizer/data"),
    ),
    *_names(
        "Functions with Python wrappers, under the name by which a function mode sees them.",
        ("torch._C._VariableFunctions", "device"),
        ("torch._C._nn._parse_to", "device device/patches"),
        ("torch._C._nn.pad_sequence", "device"),
    ),
    *_names(
        "Keeps the graph of a call on workers where backward keeps that of the script.",
        ("torch._C._autograd._get_current_graph_task_keep_graph", "session/calls"),
    ),
    *_names(
        "Whether a tensor's class of a library's has its turn with a function.",
        ("torch._C._is_torch_function_enabled", "device"),
    ),
    *_names(
        "Under a transform of `torch.func`, or in forward mode, a model is computed in the controller.",
        ("torch._C._functorch.get_unwrapped", "device"),
        ("torch._C._functorch.is_functorch_wrapped_tensor", "device device/patches"),
        ("torch._C._functorch.is_gradtrackingtensor", "device"),
        ("torch._C._functorch.peek_interpreter_stack", "device device/patches parallelizer/loss"),
        ("torch._functorch.apis.vmap_impl", "device/patches"),
        ("torch.autograd.forward_ad._current_level", "device/patches parallelizer/loss"),
    ),
    *_names("Refuses `torch.jit.trace` of a model on the workers.", ("torch._C._get_tracing_state", "device/patches")),
    *_names(
        "Tensors of this process that are on the accelerator have a class of their own, and PyTorch's own operations.",
        ("torch._C._current_graph_task_id", "device parallelizer/data"),
        ("torch._C._disabled_torch_dispatch_impl", "device"),
        ("torch._C._disabled_torch_function_impl", "device"),
    ),
    *_names(
        "Does not compare the devices of tensors of a block that is computed again.",
        ("torch.utils.checkpoint._DEFAULT_DETERMINISM_MODE", "device/patches"),
        ("torch.utils.checkpoint._allowed_determinism_checks_to_fns", "device/patches"),
    ),
    *_names(
        "Exchanges what two tensor objects are, as `torch.utils.swap_tensors`.",
        ("torch._C._swap_tensor_impl", "device"),
    ),
    *_names(
        "Losses over a vocabulary in chunks of rows; their targets are checked on the device, without waiting.",
        ("torch._C._nn.cross_entropy_loss", "parallelizer/loss"),
        ("torch._assert_async", "parallelizer/loss"),
    ),
    *_names(
        "Packed sequences are padded to the longest of the batch.",
        ("torch._VF._pad_packed_sequence", "parallelizer/loss"),
    ),
    *_names(
        "Sets the compiler to eager at once if it has been imported; imported once for all workers.",
        ("torch._dynamo", "accelerator device/patches protocol"),
    ),
    *_names(
        "What `torch.compile` was given, a module or a function; back ends by their names, and what a mode sets.",
        ("torch._dynamo.eval_frame.OptimizedModule._orig_mod", "parallelizer/compiling session/checkpoint"),
        ("torch._dynamo.eval_frame.OptimizedModule._torchdynamo_orig_callable", "protocol"),
        ("torch._dynamo.lookup_backend", "parallelizer/compiling"),
        ("torch._TorchCompileInductorWrapper", "parallelizer/compiling"),
    ),
    *_names("Copies many tensors at once.", ("torch._foreach_copy_", "parallelizer/data parallelizer/precision")),
    *_names(
        "Norms and clipping of all gradients at once, as PyTorch's own functions take them.",
        ("torch._foreach_mul_", "runtime/worker"),
        ("torch._foreach_norm", "parallelizer/data"),
    ),
    *_names("A grouped product that meta tensors take in one dtype only.", ("torch._grouped_mm", "parallelizer/loss")),
    *_names(
        "The type of an operation below autograd.",
        ("torch._ops.OpOverload", "parallelizer/tensor"),
        ("torch._ops.OpOverloadPacket", "parallelizer/tensor"),
    ),
    *_names(
        "What an operation writes, and its name.",
        ("torch._ops.OpOverload._opname", "device parallelizer/rng protocol session session/calls"),
        ("torch._ops.OpOverload._overloadname", "device session session/calls"),
        ("torch._ops.OpOverload._schema", "*"),
    ),
    *_names(
        "Replaced: where tensors of a file come back to.",
        ("torch._utils._rebuild_tensor", "device/patches"),
        ("torch.serialization._get_restore_location", "device/patches"),
        ("torch.serialization._load", "device/patches"),
        ("torch.serialization._save", "device/patches"),
    ),
    *_names(
        "Replaced: a backward runs hooks of the script inside the function mode.",
        ("torch.autograd._engine_run_backward", "device/patches session"),
    ),
    *_names(
        "Writes buffers as batch normalization does, unnoticed by autograd.",
        (
            "torch.autograd._unsafe_preserve_version_counter",
            "parallelizer/trial runtime/worker/commands runtime/worker/snapshots",
        ),
    ),
    *_names(
        "Whether a CPU computes bfloat16 in hardware.",
        ("torch.cpu._is_amx_tile_supported", "runtime/worker"),
        ("torch.cpu._is_avx512_bf16_supported", "runtime/worker"),
    ),
    *_names(
        "Replaced: no CUDA context is created in the controller.",
        ("torch.cuda._lazy_init", "device/cuda parallelizer/data"),
    ),
    *_names(
        "Replaced: workers unscale the gradients of an optimizer at once.",
        ("torch.amp.GradScaler._unscale_grads_", "device/patches"),
    ),
    *_names(
        "Replaced for tests with several workers on one GPU: gloo ends the process where DTensor gathers.",
        ("torch.distributed._functional_collectives", "runtime"),
        ("torch.distributed._functional_collectives.all_gather_tensor", ""),
    ),
    *_names(
        "A result of a collective under way, to be waited for.",
        ("torch.distributed._functional_collectives.AsyncCollectiveTensor", "parallelizer/tensor"),
    ),
    *_names("One axis of several of a mesh.", ("torch.distributed.device_mesh.DeviceMesh._flatten", "parallelizer")),
    *_names(
        "The process group of all workers.",
        ("torch.distributed.distributed_c10d._get_default_group", "parallelizer parallelizer/pipeline"),
    ),
    *_names(
        "The state of FSDP2 of a module: groups of parameters, precision, what is a root and what is inside.",
        ("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "parallelizer/data"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group", "parallelizer/data"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups", "parallelizer/data"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init", "parallelizer/data"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._mp_policy", "parallelizer/data"),
    ),
    *_names(
        "Brings FSDP2 back to rest after a call that raised.",
        ("torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState", "parallelizer/data"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._state_ctx", "parallelizer/data"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._training_state", "parallelizer/data"),
        (
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._partial_reduce_output",
            "parallelizer/data",
        ),
    ),
    *_names(
        "Replaced: zeros for missing gradients, layers that wait for all, gathers without modes, parameters of others.",
        ("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._module_info", "parallelizer/state"),
        ("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param", "parallelizer/state"),
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup", "parallelizer/surroundings"),
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward", "parallelizer/data"),
        ("torch._C._current_autograd_node", "parallelizer/data"),
    ),
    *_names(
        "Replaced: `fully_shard` refuses models on the accelerator.",
        ("torch.distributed.fsdp._fully_shard._fully_shard", "device/patches"),
        ("torch.distributed.fsdp._fully_shard._fully_shard._validate_module", "device/patches"),
    ),
    *_names(
        "Runs our stages under PyTorch's schedules.",
        ("torch.distributed.pipelining.schedules._PipelineSchedule._step_microbatches", "parallelizer/call"),
        ("torch.distributed.pipelining.stage._PipelineStageBase", "parallelizer/pipeline"),
        ("torch.distributed.pipelining.stage._PipelineStageBase._create_grad_recv_info", "parallelizer/pipeline"),
        ("torch.distributed.pipelining.stage._PipelineStageBase._get_init_p2p_neighbors_ops", "parallelizer/pipeline"),
        ("torch.distributed.pipelining.stage._PipelineStageBase._prepare_backward_infra", "parallelizer/pipeline"),
        ("torch.distributed.pipelining.stage._PipelineStageBase._prepare_forward_infra", "parallelizer/pipeline"),
    ),
    *_names(
        "The shard that is here: optimizers step by it, as an ordinary tensor.",
        ("torch.distributed.tensor.DTensor._local_tensor", "runtime/worker"),
    ),
    *_names(
        "Which rows of a sharded tensor are here.",
        ("torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "parallelizer/state"),
    ),
    *_names(
        "The function of Python that a scripted function was made from.",
        ("torch.jit.ScriptFunction._torchdynamo_inline", "protocol"),
    ),
    *_names(
        "Moves, casts and materializes all tensors of a module, as `Module.to` does.",
        ("torch.nn.Module._apply", "device/patches parallelizer/state"),
    ),
    *_names(
        "Runs hooks of the script where the module is called, and keeps those on parameters.",
        ("torch.Tensor._post_accumulate_grad_hooks", "device/patches"),
        ("torch.nn.Module._backward_hooks", "*"),
        (
            "torch.nn.Module._backward_pre_hooks",
            "protocol protocol/script_code session/models session/own_process session/verification",
        ),
        ("torch.nn.Module._forward_hooks", "*"),
        ("torch.nn.Module._forward_pre_hooks", "*"),
        ("torch.nn.Module._is_full_backward_hook", "session/models"),
    ),
    *_names(
        "Sees every parameter and buffer with the module and name that holds it, ties included.",
        ("torch.nn.Module._buffers", "*"),
        ("torch.nn.Module._modules", "parallelizer/pipeline session/models"),
        ("torch.nn.Module._parameters", "*"),
    ),
    *_names(
        "Calls a module that runs in this process, past the replacement of its `__call__`.",
        ("torch.nn.Module._call_impl", "device/patches session session/own_process"),
    ),
    *_names(
        "A step that a script's hooks look at is not run on the values.",
        ("torch.optim.Optimizer._optimizer_step_post_hooks", "session/own_process"),
        ("torch.optim.Optimizer._optimizer_step_pre_hooks", "session/own_process"),
    ),
    *_names(
        "Not an attribute for the workers: a compiled call stays here.",
        ("torch.nn.Module._compiled_call_impl", "device/patches session/own_process"),
    ),
    *_names(
        "Leaves out buffers that a state dict leaves out.",
        ("torch.nn.Module._non_persistent_buffers_set", "session/checkpoint session/models"),
    ),
    *_names(
        "Normalization.", ("torch.nn.modules.batchnorm._BatchNorm", "device parallelizer/compiling parallelizer/data")
    ),
    *_names("Convolutions of any dimensions.", ("torch.nn.modules.conv._ConvNd", "protocol")),
    *_names("Dropout of any dimensions.", ("torch.nn.modules.dropout._DropoutNd", "session/verification")),
    *_names(
        "Calls that PyTorch would run global hooks around stay in the controller.",
        ("torch.nn.modules.module._has_any_global_hook", "session session/calls session/own_process"),
    ),
    *_names(
        "Replaced: `DataParallel` finds no device to scatter to.",
        ("torch.nn.parallel.data_parallel._get_available_device_type", "device/patches"),
    ),
    *_names(
        "Replaced: both halves of `clip_grad_norm_`.",
        ("torch.nn.utils.clip_grad._clip_grads_with_norm_", "device/patches"),
        ("torch.nn.utils.clip_grad._get_total_norm", "device/patches"),
    ),
    *_names(
        "Makes the class of a parametrized module again, which pickle cannot.",
        ("torch.nn.utils.parametrize._inject_new_class", "protocol"),
        ("torch.nn.utils.parametrize._inject_property", "protocol"),
    ),
    *_names(
        "Operations below autograd that tables of ours name.",
        ("torch.ops.aten._index_put_impl_", "device"),
        ("torch.ops.aten._local_scalar_dense", "device"),
        ("torch.ops.aten._log_softmax", "parallelizer/loss protocol"),
        ("torch.ops.aten._log_softmax_backward_data", "parallelizer/loss protocol"),
        ("torch.ops.aten._scaled_dot_product_cudnn_attention", "parallelizer/data"),
        ("torch.ops.aten._scaled_dot_product_efficient_attention", "parallelizer/data"),
        ("torch.ops.aten._scaled_dot_product_flash_attention", "parallelizer/data"),
        ("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "parallelizer/data"),
        ("torch.ops.aten._scaled_dot_product_fused_attention_overrideable", "parallelizer/data"),
        ("torch.ops.aten._softmax", "parallelizer/loss protocol"),
        ("torch.ops.aten._softmax_backward_data", "parallelizer/loss protocol"),
        ("torch.ops.aten._to_copy", "device parallelizer/loss protocol"),
        ("torch.ops.aten._unsafe_view", "parallelizer/loss protocol session/calls"),
    ),
    *_names(
        "The stack of function modes of a thread.",
        (
            "torch.overrides._get_current_function_mode_stack",
            "parallelizer/compiling parallelizer/data parallelizer/loss",
        ),
        ("torch.overrides._len_torch_function_stack", "device session/own_process"),
        ("torch.overrides._pop_mode", "device parallelizer/data"),
        ("torch.overrides._push_mode", "device parallelizer/data"),
    ),
    *_names(
        "Which functions make tensors, and on which device by default.",
        ("torch.utils._device", "device"),
        ("torch.utils._device.CURRENT_DEVICE", "device"),
        ("torch.utils._device._device_constructors", "device"),
    ),
    *_names(
        "Changes shapes of virtual tensors without being called back.",
        ("torch.utils._mode_utils.no_dispatch", "device"),
    ),
    *_names(
        "Collates tensors of a library's class by its own function.",
        ("torch.utils.data._utils.collate", "device/patches"),
    ),
    *_names("Timed in traces.", ("torch.utils.data.dataloader._BaseDataLoaderIter", "session")),
    *_names("Tells named tuples of one form: a public name.", ("inspect.FullArgSpec._fields", "protocol")),
    *_names(
        "Follows operations below autograd.",
        ("torch.utils._python_dispatch.TorchDispatchMode", "parallelizer/call parallelizer/data parallelizer/rng"),
    ),
    *_names(
        "How arguments and results nest; PyTorch has no public module for it.",
        ("torch.utils._pytree", "integrations parallelizer/items protocol protocol/objects"),
        ("torch.utils._pytree.SUPPORTED_NODES", "integrations protocol"),
        ("torch.utils._pytree.TreeSpec", "integrations parallelizer/pipeline protocol session/models"),
        ("torch.utils._pytree.tree_flatten", "*"),
        ("torch.utils._pytree.tree_leaves", "*"),
        ("torch.utils._pytree.tree_map", "*"),
        ("torch.utils._pytree.tree_map_only", "*"),
        ("torch.utils._pytree.tree_unflatten", "*"),
    ),
    *_names(
        "Adds a class to pytrees so that it can be removed again.",
        ("torch.utils._pytree._deregister_pytree_node", "protocol"),
        ("torch.utils._pytree._private_register_pytree_node", "protocol"),
    ),
    *_names(
        "Which outputs a model can record: its constructor fills the table, unpickling does not.",
        ("transformers.PreTrainedModel._can_record_outputs", "integrations"),
        ("transformers.utils.output_capturing._CAN_RECORD_REGISTRY", "integrations"),
    ),
    *_names(
        "How transformers itself would split the layers.",
        ("transformers.PreTrainedModel._tp_plan", "parallelizer/tensor"),
    ),
    *_names(
        "What `GradScaler` calls to unscale gradients and to find one that is not finite.",
        ("torch._amp_foreach_non_finite_check_and_unscale_", "protocol runtime/worker"),
        ("torch.ops.aten._amp_foreach_non_finite_check_and_unscale_", "protocol"),
    ),
    *_names(
        "Which kernels compute attention.",
        ("transformers.PretrainedConfig._attn_implementation", "session/verification"),
    ),
    *_names("Whether an import is still under way.", ("importlib.__spec__._initializing", ".")),
    *_names(
        "Processes of the script get objects by value, and forked loaders end before the engine's exit handlers.",
        ("multiprocessing.reduction.ForkingPickler._extra_reducers", "device/patches"),
        ("multiprocessing.util._exit_function", "runtime"),
    ),
    *_names(
        "The other exit handlers run before a failed save makes the exit status of a script 1.",
        ("atexit._run_exitfuncs", "session/checkpoint"),
    ),
    *_names("A forked process knows whether it could use a device.", ("torch.cuda._is_in_bad_fork", "runtime/forking")),
    *_names("Threads that wait as Python ends.", ("monarch._src.actor.returns_future._ThreadLoop", "runtime")),
)
