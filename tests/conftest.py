"""Sets up the whole session: Triton kernels run on CPU tensors through the interpreter unless a GPU is present."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
