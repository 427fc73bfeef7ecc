"""Operators over hidden states, which materialize logits for one chunk of rows at a time.

``matmul`` selects the implementation of matmuls, ``backends`` that of operations on rows of logits. Masked
tokens are not projected, and the gradient matmuls skip rows whose gradient is zero.

16-bit inputs have fp32 logits (``logits_dtype="float32"``). On CUDA the rows of the gradient matmuls are
16-bit and unscaled (p - onehot), in the memory of the fp32 logits. Coefficients multiply hidden rows and
results instead, normalized by powers of two against underflow. On the CPU 16-bit weights are converted to
fp32 in slabs for faster matmuls, unless the C++ backend multiplies bf16.

The C++ backend computes gradient rows along with a chunk's statistics, from the same exponentials, up to a
factor per row. Triton does so if a row fits in shared memory and no ratio is needed.
"""
