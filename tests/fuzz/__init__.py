"""Random calls of every entry against the naive fp64 oracle.

``python -m tests.fuzz --backend cpp --seconds 60`` draws layouts, lengths 0 and 1, dtypes, strides, holes
with NaN and infinities, every term, every kind of teacher, schedule and chunk size, upstream gradients,
extremes. It looks for wrong values, not for units in the last place (the tests do that): an error may be a
generous multiple of plain fp32's, and neither a clip decision nor a choice of top ids that rounding could
turn is drawn. It ends with 1 at the first failure, after the line that repeats it.
"""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SINGLE = torch.finfo(torch.float32)
