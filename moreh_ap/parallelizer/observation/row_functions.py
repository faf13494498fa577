"""Functions of PyTorch by what they do with rows: they may add up, are linear, draw, or put rows in another order.

Decides which names these are. Must not know how a function is tried (`trial/function_trial.py`).
"""

from __future__ import annotations

from moreh_ap.parallelizer.observation.torch_calls import names

SUMS = names(
    "sum nansum mean einsum matmul __matmul__ __rmatmul__ mm bmm mv dot tensordot addmm linear trace",
    "bincount histc count_nonzero scatter_add scatter_add_ index_add index_add_",
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div",
    "binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss soft_margin_loss margin_ranking_loss",
    "hinge_embedding_loss cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss",
    "multilabel_soft_margin_loss",
)
"""Functions whose results for slices of rows may be summands of the one for all rows."""
LINEAR = names(
    "add __add__ __radd__ __iadd__ add_ sub __sub__ neg __neg__ mul __mul__ __rmul__ div __truediv__ true_divide",
    "stack cat sum view reshape unsqueeze squeeze to float double clone contiguous __getitem__ unbind detach",
)
"""Functions that give summands for summands."""
ADDING = names("add __add__ __radd__ __iadd__ add_ sub __sub__")
SCALING = names("mul __mul__ __rmul__ div __truediv__ true_divide")
ADDED_TO = dict.fromkeys(names("addmm scatter_add scatter_add_ index_add index_add_"), 0) | {"linear": 2}
"""Of functions that add what rows give to a tensor: its position. Each worker would add it."""
DRAWS = names(
    "rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform_ bernoulli bernoulli_",
    "multinomial poisson exponential_ random_ dropout dropout_ dropout1d dropout2d dropout3d feature_dropout",
    "_sample_dirichlet _standard_gamma alpha_dropout feature_alpha_dropout",
)
REORDERS = (
    names("argsort flip flipud roll cumsum cumprod logcumsumexp"),
    names("__getitem__ index_select take_along_dim gather"),
)
"""Functions that put rows into another order, or give each what those before it add to it, by themselves or by indices
that have rows. A worker keeps as many."""
WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
