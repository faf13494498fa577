"""What a model costs, counted for its first layers, one block and its last layers.

Decides in which quantities the planner thinks of a model: parameters, matrix products, bytes kept and bytes moved for
every token. Must not know which architecture a model has, how it is spread, or on which devices it runs: a profile
may come from a shape (`transformer_shape.py`) or be counted on the model itself.

[Note: split and replicated]
A tensor axis of `t` devices cuts what is called *split* into `t` equal shards and leaves what is called *replicated* on
every device. Sequence parallelism cuts replicated activations too, by positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["Frozen", "LayerProfile", "ModelProfile", "Product"]

BYTES_PER_VALUE = 2.0
"""Bytes of a value in the 16-bit precisions in which all bytes of a profile are counted; float32 has twice as many."""


@dataclass(frozen=True)
class Product:
    """One matrix product that every token goes through: (tokens x inner) times (inner x outer).

    Attributes:
        inner: Length that is summed over.
        outer: Length of the result.
        split: Which of the two the tensor axis cuts, "inner", "outer" or "" for neither.
        share: Part of the tokens that goes through it; above 1 where a token takes several experts.
        copies: Number of equal matrices among which those tokens are spread, such as experts; less than 1 where not
            every block has it.
    """

    inner: int
    outer: int
    split: str = ""
    share: float = 1.0
    copies: float = 1.0

    @property
    def flops_per_token(self) -> float:
        """Operations of the forward, a multiplication and an addition for each weight that is used."""
        return 2.0 * self.inner * self.outer * self.share


@dataclass(frozen=True)
class LayerProfile:
    """A segment of a model: the layers before the blocks, one block, or the layers after them.

    Bytes are those of 16-bit values. See [Note: split and replicated].

    Attributes:
        parameters_split: Parameter elements that the tensor axis cuts.
        parameters_replicated: Parameter elements that it leaves on every device.
        products: Matrix products with parameters.
        attention_flops_per_row: Operations of the forward of attention itself (scores and weighted sum) for one row,
            counting only what a causal mask leaves.
        attention_width: Length of a head; 0 without attention.
        score_bytes_per_row: Bytes kept of the scores of one row where attention is not fused.
        kept_split_bytes_per_token: Bytes kept from forward to backward, nothing recomputed.
        kept_replicated_bytes_per_token: The same for activations that the tensor axis leaves on every device.
        selective_split_bytes_per_token: As `kept_split_bytes_per_token` under selective recomputation.
        selective_replicated_bytes_per_token: As `kept_replicated_bytes_per_token` under selective recomputation.
        moved_split_bytes_per_token: Bytes that the forward's elementwise operations read and write.
        moved_replicated_bytes_per_token: The same for activations that the tensor axis leaves on every device.
        num_kernels: Operations that the forward starts on the device.
        num_tensor_sums: Sums over the tensor axis of one hidden state for each token, in the forward.
        trained_parameters: Parameter elements that are trained where others are frozen (`ModelProfile.frozen`), on
            every device of a tensor axis.
    """

    parameters_split: float = 0.0
    parameters_replicated: float = 0.0
    products: tuple[Product, ...] = ()
    attention_flops_per_row: float = 0.0
    attention_width: int = 0
    score_bytes_per_row: float = 0.0
    kept_split_bytes_per_token: float = 0.0
    kept_replicated_bytes_per_token: float = 0.0
    selective_split_bytes_per_token: float = 0.0
    selective_replicated_bytes_per_token: float = 0.0
    moved_split_bytes_per_token: float = 0.0
    moved_replicated_bytes_per_token: float = 0.0
    num_kernels: int = 0
    num_tensor_sums: int = 0
    trained_parameters: float = 0.0

    @cached_property
    def parameters(self) -> float:
        """Parameter elements."""
        return self.parameters_split + self.parameters_replicated

    @cached_property
    def product_flops_per_token(self) -> float:
        """Operations of the forward in matrix products with parameters."""
        return sum(product.flops_per_token for product in self.products)

    def parameters_on_device(self, tensor: int) -> float:
        """Parameter elements that one of `tensor` devices holds."""
        return self.parameters_split / tensor + self.parameters_replicated

    def kept_bytes_per_row(self, length: int, tensor: int, sequence_parallel: bool) -> float:
        """Bytes that one of `tensor` devices keeps of a row of so many positions, nothing recomputed."""
        whole = 1.0 / tensor if sequence_parallel else 1.0
        return length * (self.kept_split_bytes_per_token / tensor + self.kept_replicated_bytes_per_token * whole)


@dataclass(frozen=True)
class Frozen:
    """How weights that are not trained are kept.

    Attributes:
        block_bytes: Bytes for each of a block's frozen parameters.
        outside_bytes: The same outside of blocks.
        is_packed: Whether those of blocks are unpacked for each product: they travel as they are kept, and one matrix
            at a time is there in the computation's precision.
        constant_bytes: Bytes of a quantization's constants for each of a block's frozen parameters, on average. Every
            device has them whole.
    """

    block_bytes: float = 4.0
    outside_bytes: float = 4.0
    is_packed: bool = False
    constant_bytes: float = 0.0


@dataclass(frozen=True)
class ModelProfile:
    """A model as the planner sees it: first layers, equal blocks, and last layers.

    Attributes:
        name: How messages call it.
        sequence_length: Positions of a row on one device.
        hidden: Length of the state that is handed from block to block.
        num_blocks: Number of equal blocks.
        first: The layers before the blocks: embeddings.
        block: One block.
        last: The layers after them: the final norm and the head.
        logits_per_token: Elements of the result of the last layers; 0 where there is no loss over a vocabulary.
        tied: Whether first and last layers share weights. Those of the last layers are then counted in the first alone,
            and a pipeline keeps them twice.
        tied_parameters: Parameter elements that they share.
        frozen: How weights are kept that are not trained, as all but adapters; None where all weights are trained.
        loss_outside: Whether the script computes the loss from the logits, instead of the forward.
        logits_returned: Whether logits are results of the forward.
    """

    name: str
    sequence_length: int
    hidden: int
    num_blocks: int
    first: LayerProfile
    block: LayerProfile
    last: LayerProfile
    logits_per_token: int = 0
    tied: bool = False
    tied_parameters: float = 0.0
    frozen: Frozen | None = None
    loss_outside: bool = False
    logits_returned: bool = True

    @cached_property
    def parameters(self) -> float:
        """Parameter elements of the whole model, tied ones once."""
        return self.first.parameters + self.num_blocks * self.block.parameters + self.last.parameters

    @cached_property
    def boundary_bytes_per_row(self) -> float:
        """Bytes of the state of one row that is handed from block to block, in 16-bit values."""
        return BYTES_PER_VALUE * self.hidden * self.sequence_length

    @cached_property
    def flops_per_row(self) -> float:
        """Operations of forward and backward of one row, nothing recomputed.

        Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, appendix: the
        backward of a product takes twice its forward.
        """
        blocks = self.num_blocks
        products = (
            self.first.product_flops_per_token
            + blocks * self.block.product_flops_per_token
            + self.last.product_flops_per_token
        )
        return 3.0 * (products * self.sequence_length + blocks * self.block.attention_flops_per_row)
