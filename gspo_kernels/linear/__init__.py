"""Operators over hidden states: logits exist only a chunk of rows at a time.

Matrix products belong to the vendor library through torch, rows to the backend. Counted rows are compacted
first: masked tokens are never projected, and rows whose gradient is zero enter no gradient product.

16-bit inputs: the product leaves in fp32 (``logits_dtype="float32"``). On CUDA the rows that enter the
gradient products are 16-bit and unscaled (p - onehot), written into the memory of the fp32 logits;
coefficients, normalised to at most 1, multiply the hidden rows and the result, so that nothing underflows. On
CPU 16-bit weights are raised to fp32 in slabs, as fp32 products are faster there.

The C++ backend makes rows of a chunk's logits along with their statistics: the same exponentials serve both,
and what is missing to p - onehot is a factor per row, which multiplies where the coefficient does. Triton
writes rows along with their statistics where they fit on the chip and no log-probs are compared.
"""
