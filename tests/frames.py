"""Which Python functions of the package one call enters, forward and backward, and their deepest chain.

    python -m tests.frames     from the project's root: the numbers and, indented, the functions

A reader who follows a call pays for every name on its way. Comprehensions don't count. Nor do imports and
cached work, which only the first call does.
"""

import sys
from pathlib import Path

import torch

import gspo_kernels as gk

PACKAGE = str(Path(gk.__file__).parent)
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>")


def frames(call):
    """Return the functions in the order in which they are first entered, each with its largest depth."""
    call()
    depth, seen = 0, {}

    def profile(frame, event, _):
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or code.co_name in COMPREHENSIONS:
            return
        if not code.co_filename.startswith(PACKAGE):
            return
        depth += 1 if event == "call" else -1
        if event == "call":
            name = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_name}"
            seen[name] = max(depth, seen.get(name, 0))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def calls():
    """Return one call of each kind, with a mask. From hidden states there are several chunks."""
    generator = torch.Generator().manual_seed(0)
    B, T, H, V = 8, 64, 64, 3000
    hidden = torch.randn(B, T, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_()
    labels = torch.randint(V, (B, T), generator=generator)
    advantages = torch.randn(B, generator=generator)
    old = gk.linear_token_logprobs(hidden, weight, labels).logprobs.detach()
    logits = (hidden @ weight.T).detach().requires_grad_()
    mask = torch.ones(B, T)
    mask[:, 50:] = 0
    rest = (labels, old, advantages)
    return {
        "policy_loss": lambda: gk.policy_loss(
            old.clone().requires_grad_(), old, advantages, loss_mask=mask
        ).loss.backward(),
        "logits": lambda: gk.fused_policy_loss(logits, *rest, loss_mask=mask).loss.backward(),
        "hidden": lambda: gk.fused_linear_policy_loss(
            hidden, weight, *rest, loss_mask=mask, max_chunk_bytes=200 * V * 4
        ).loss.backward(),
    }


if __name__ == "__main__":
    for name, call in calls().items():
        seen = frames(call)
        print(f"{name}: {max(seen.values())} deep, {len(seen)} functions")
        for function, depth in seen.items():
            print("  " * depth + function)
