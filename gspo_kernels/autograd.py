"""Autograd inside operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def inner_autograd() -> Iterator[None]:
    """Let autograd work inside an operator's implementation.

    A compiled graph calls operators with autograd's dispatch keys excluded, and ``enable_grad`` doesn't bring
    them back. PyTorch has no public way to do it.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(included, excluded),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield
