"""Which Python functions of the package one call enters, forward and backward, and their deepest chain.

    python -m tests.frames     from the project's root: the numbers and, indented, the functions

A reader who follows a call pays for every name on its way. Comprehensions don't count. Nor do imports and
cached work, which only the first call does.
"""

import sys
from functools import partial
from pathlib import Path

import gspo_kernels as gk
from tests import cases

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
    found, chunks = {}, {"max_chunk_bytes": 200 * 3000 * 4}
    sequences = {"lengths": (50,) * 8, "log_s": (0.0,) * 8, "advantages": (1.0, -1.0) * 4}
    for entry in ("policy_loss", "fused_policy_loss", "fused_linear_policy_loss"):
        kind = cases.KIND[entry]
        case = cases.make_case(kind, "padded", "loss_mask", **sequences, vocabulary=3000, bias=False)
        leaves = {name: value.clone().requires_grad_() for name, value in case.inputs.items()}
        forward = partial(cases.call, case, leaves, entry, gk.GSPO(), **(chunks if kind == "linear" else {}))
        found[kind] = lambda forward=forward: forward().loss.backward()
    return found


if __name__ == "__main__":
    for name, call in calls().items():
        seen = frames(call)
        print(f"{name}: {max(seen.values())} deep, {len(seen)} functions")
        for function, depth in seen.items():
            print("  " * depth + function)
