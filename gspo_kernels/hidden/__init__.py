"""Operators over hidden states: logits exist only a chunk of rows at a time.

``products`` says who multiplies matrices: torch with the vendor's library, or the C++ backend. The backend
works on rows of logits. Counted rows are compacted first: masked tokens are never projected, and rows whose
gradient is zero enter no gradient product.

16-bit inputs have fp32 logits (``logits_dtype="float32"``). On CUDA the rows that enter the gradient products
are 16-bit and unscaled (p - onehot), written into the memory of the fp32 logits. Coefficients multiply hidden
rows and results instead, normalised by powers of two where they could underflow. On the CPU 16-bit weights
are converted to fp32 in slabs, as fp32 products are faster there, unless C++ multiplies bf16.

The C++ backend computes the rows of the gradient products along with a chunk's statistics, from the same
exponentials. Each row is p - onehot up to a factor, which multiplies together with the coefficient. Triton
computes rows along with statistics where a row fits on the chip and no log-probs are compared.
"""
