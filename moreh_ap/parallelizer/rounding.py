"""How far two computations of one number may differ by rounding alone, by the dtype in which it was computed.

Decides the numbers. Must not know what is compared, nor models.
"""

TOLERANCE_FP32 = 2e-5
"""Largest difference, relative to the largest entry of a tensor, that rounding explains in float32 (eps 1.2e-7)."""
TOLERANCE_BF16 = 3e-2
"""The same in bfloat16 (eps 7.8e-3)."""
TOLERANCE_TF32 = 4e-3
"""The same where GPUs round the factors of float32 products to TF32 (eps 9.8e-4), as cuDNN's convolutions do unless a
script says otherwise: for another number of rows the library may choose a kernel that does not."""
