"""What one layer of each kind costs: attention, a feed-forward, experts, a state space.

Decides how the numbers of a layer become parameters, products, bytes kept and bytes moved. Must not know how many
layers of which kind a model has, nor plans or devices.

[Note: bytes kept by a layer]
Every operation of an unfused layer keeps what its backward needs, in 2 bytes a value. Before every layer stands a
norm, whose input and result are kept: 4h with `h` the hidden width. With `q` the width of queries, `k` of keys, `v`
of values and `o` of their mixture, attention keeps 2(q + k + v) + 2(q + k) for queries, keys and values before and
after rotation, and its result 2o. A feed-forward of width `f` keeps 2f for what goes into the activation function, 2f
for what comes out, and where it is gated 2f for the gate's factor and 2f for their product. Experts keep a copy of a
token for each of them that it goes to. Source: counted as in Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models", 2022, section 4.1, without dropout and with fused attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moreh_ap.planner.profiles.model_profile import LayerProfile, Product

__all__ = ["AttentionCost", "FeedForwardCost", "StateSpaceCost", "mean_of"]

_KERNELS = 12
"""Operations that a layer starts, its norm and its residual among them, apart from what is added below."""


@dataclass(frozen=True)
class AttentionCost:
    """Attention over a row.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a head of queries and keys.
        value_dim: Width of a head of values.
        rotated: Whether queries and keys are rotated by their positions.
        query_rank: Width through which queries are computed; 0 where they come from the hidden state at once.
        kv_rank: Width through which keys and values are computed; 0 likewise. Source: DeepSeek-AI, "DeepSeek-V2", 2024,
            section 2.1 (multi-head latent attention).
        shared_dim: Part of `head_dim` in which all heads have the same key, where there is a `kv_rank`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rotated: bool = True
    query_rank: int = 0
    kv_rank: int = 0
    shared_dim: int = 0

    def profile(self, hidden: int, biases: bool, sequence_length: int, context_length: int) -> LayerProfile:
        """Returns what it costs for rows of `sequence_length` positions that see `context_length`."""
        queries, mixed = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        keys, values = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_dim
        inside: list[Product] = []
        latent = 0
        if self.kv_rank:
            latent = self.query_rank + self.kv_rank + self.shared_dim
            inside.append(Product(hidden, latent))
            inside.append(Product(self.query_rank or hidden, queries, "outer"))
            own = self.head_dim - self.shared_dim + self.value_dim
            inside.append(Product(self.kv_rank, self.num_heads * own, "outer"))
        else:
            inside.append(Product(hidden, queries + keys + values, "outer"))
        inside.append(Product(mixed, hidden, "inner"))
        rotated = 2.0 * (queries + keys) if self.rotated else 0.0
        results = 2.0 * (queries + keys + values)
        return LayerProfile(
            parameters_split=float(sum(one.inner * one.outer for one in inside if one.split)),
            parameters_replicated=float(
                sum(one.inner * one.outer for one in inside if not one.split)
                + (self.query_rank + self.kv_rank)
                + (queries + keys + values + hidden if biases else 0)
                + _norm(hidden, biases)
            ),
            products=tuple(inside),
            # scores and weighted sum, of which a causal mask leaves half
            attention_flops_per_row=float(sequence_length * context_length * (queries + mixed)),
            attention_width=self.head_dim,
            # softmax's result and a copy of it in the precision of the product
            score_bytes_per_row=5.0 * self.num_heads * sequence_length * context_length,
            kept_split_bytes_per_token=results + rotated + 2.0 * mixed,
            kept_replicated_bytes_per_token=4.0 * hidden + 4.0 * latent,
            # results of products and of attention; norms, rotation and activation functions are computed again
            selective_split_bytes_per_token=results + 2.0 * mixed,
            selective_replicated_bytes_per_token=2.0 * hidden + 2.0 * latent,
            moved_split_bytes_per_token=2.0 * rotated,
            moved_replicated_bytes_per_token=_moved(hidden) + 8.0 * latent,
            num_kernels=_KERNELS + (10 if self.rotated else 2),
            num_tensor_sums=1,
        )


@dataclass(frozen=True)
class FeedForwardCost:
    """A feed-forward, or experts of which a token takes some.

    Attributes:
        width: Its inner width, or that of one expert.
        gated: Whether it has a gate, three matrices instead of two.
        num_experts: Experts, 1 without.
        experts_per_token: How many of them a token goes through.
        shared_width: Inner width of what every token goes through beside its experts.
        latent: Width to which tokens are brought before they go to experts; 0 where experts take the hidden state.
        spread: Devices, beyond the tensor axis, over which the experts are distributed. A device then holds its part,
            and computes for as many tokens as it has itself, which come from all of these devices.
    """

    width: int
    gated: bool = True
    num_experts: int = 1
    experts_per_token: int = 1
    shared_width: int = 0
    latent: int = 0
    spread: int = 1

    def profile(self, hidden: int, biases: bool) -> LayerProfile:
        """Returns what it costs."""
        widenings = 2 if self.gated else 1
        taken, here = float(self.experts_per_token), self.num_experts / self.spread
        inside = self.latent or hidden
        products = [
            Product(inside, widenings * self.width, "outer", taken, here),
            Product(self.width, inside, "inner", taken, here),
        ]
        router = 0
        if self.num_experts > 1:
            router = hidden * self.num_experts
            products.append(Product(hidden, self.num_experts))
        if self.shared_width:
            products.append(Product(hidden, widenings * self.shared_width, "outer"))
            products.append(Product(self.shared_width, hidden, "inner"))
        if self.latent:
            products += [Product(hidden, self.latent), Product(self.latent, hidden)]
        matrices = widenings + 1
        width = self.width * taken + self.shared_width
        return LayerProfile(
            parameters_split=here * matrices * inside * self.width + matrices * hidden * self.shared_width,
            parameters_replicated=float(
                router
                + 2 * hidden * self.latent
                + (here * (widenings * self.width + inside) if biases else 0)
                + _norm(hidden, biases)
            ),
            products=tuple(products),
            kept_split_bytes_per_token=4.0 * widenings * width,
            kept_replicated_bytes_per_token=4.0 * hidden + self._copies_bytes(inside),
            selective_split_bytes_per_token=2.0 * widenings * width,
            selective_replicated_bytes_per_token=2.0 * hidden,
            # residuals read two and write one; activation functions read and write
            moved_split_bytes_per_token=4.0 * width * (2 * widenings - 0.5),
            moved_replicated_bytes_per_token=_moved(hidden) + 4.0 * self._copies_bytes(inside),
            num_kernels=_KERNELS + (8 * round(min(here, 8)) if self.num_experts > 1 else 0),
            num_tensor_sums=1,
        )

    def _copies_bytes(self, inside: int) -> float:
        """Returns the bytes of a token's copies, one for each expert that it goes to."""
        return 2.0 * inside * self.experts_per_token if self.num_experts > 1 else 0.0


@dataclass(frozen=True)
class StateSpaceCost:
    """A layer that carries a state along the row. Source: Dao and Gu, "Transformers are SSMs", 2024, section 6 and 7.

    Attributes:
        num_heads: Heads.
        head_dim: Width of a head.
        num_groups: Groups of heads that share what goes into and comes out of the state.
        state: Length of a head's state.
        kernel: Positions that its convolution sees.
        chunk: Positions that are computed as a square matrix.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state: int
    kernel: int = 4
    chunk: int = 128

    def profile(self, hidden: int, biases: bool, sequence_length: int) -> LayerProfile:
        """Returns what it costs for rows of `sequence_length` positions."""
        inner, beside = self.num_heads * self.head_dim, 2 * self.num_groups * self.state
        into = 2 * inner + beside + self.num_heads
        # scores of a chunk and their products with it, of which a causal mask leaves half; the state written and read
        scan = self.chunk * (self.num_groups * self.state + inner) + 4.0 * self.state * inner
        kept = 2.0 * into + 2.0 * (inner + beside) + 4.0 * inner
        states = 4.0 * self.state * inner / self.chunk  # in float32, one for each chunk
        return LayerProfile(
            parameters_split=float((into + inner) * hidden + (inner + beside) * (self.kernel + 1) + inner),
            parameters_replicated=float(3 * self.num_heads + _norm(hidden, biases)),
            products=(Product(hidden, into, "outer"), Product(inner, hidden, "inner")),
            attention_flops_per_row=sequence_length * scan,
            attention_width=self.head_dim,
            kept_split_bytes_per_token=kept,
            kept_replicated_bytes_per_token=4.0 * hidden,
            selective_split_bytes_per_token=2.0 * into + 2.0 * inner,
            selective_replicated_bytes_per_token=2.0 * hidden,
            moved_split_bytes_per_token=2.0 * kept + 4.0 * states,  # written, passed on, and read
            moved_replicated_bytes_per_token=_moved(hidden),
            num_kernels=_KERNELS + 8,
            num_tensor_sums=1,
        )


def mean_of(layers: Sequence[tuple[LayerProfile, float]]) -> LayerProfile:
    """Returns one layer that costs as much as these layers together, each as often as its number says.

    Half a layer is one matrix that half of all blocks have: as many tokens go through it as through any.
    """
    sums: dict[str, Any] = {}
    for layer, often in layers:
        for field in fields(LayerProfile):
            if field.name not in ("products", "attention_width"):
                sums[field.name] = sums.get(field.name, 0.0) + often * getattr(layer, field.name)
    products = tuple(
        replace(product, share=product.share * often, copies=product.copies * often)
        for layer, often in layers
        for product in layer.products
        if often
    )
    whole = {name: round(sums.pop(name)) for name in ("num_kernels", "num_tensor_sums")}
    widths = [layer.attention_width for layer, often in layers if often and layer.attention_width]
    return LayerProfile(products=products, attention_width=widths[0] if widths else 0, **whole, **sums)


def _norm(hidden: int, biases: bool) -> int:
    """Returns the parameters of a norm."""
    return hidden * (2 if biases else 1)


def _moved(hidden: int) -> float:
    """Returns the bytes that the norm before a layer and the residual after it read and write."""
    return 2.0 * hidden * (4 + 3)
