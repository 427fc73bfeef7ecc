"""One call of every kernel, through the functions that users call.

``python -m tests.gpu.calls NAME...`` runs some of them on a small case, for compute-sanitizer.
"""

import sys
from functools import partial
from typing import NamedTuple

import torch

import gspo_kernels as gk
from tests.draws import shifted_seed

B = 4
"""The number of sequences: of equal length, or packed with an empty one among them."""


class Scale(NamedTuple):
    """Sizes of a test: those that a GPU runs in seconds, or those for the interpreter."""

    tokens: int
    vocabulary: int
    width: int
    runs: int


def problem(device, tokens, vocabulary, width=0, dtype=torch.bfloat16, seed=0):
    """Draw (logits or (hidden, weight), labels, old, advantages); one token is ignored."""
    generator = torch.Generator(device).manual_seed(shifted_seed(seed))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    labels = torch.randint(vocabulary, (B, tokens // B), generator=generator, device=device)
    labels[1, 0] = -100
    old = -3 + 0.01 * normal(B, tokens // B)
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0], device=device)
    if not width:
        return normal(B, tokens // B, vocabulary).to(dtype), labels, old, advantages
    weight = (normal(vocabulary, width) * 3 / width**0.5).to(dtype)
    return (normal(B, tokens // B, width).to(dtype), weight), labels, old, advantages


def results(out, leaves):
    """Return the loss, the other outputs per token, the metrics, and the gradients."""
    more = [value for value in out[1:3] if isinstance(value, torch.Tensor)]
    metrics = getattr(out, "metrics", {}).values()
    return out.loss.detach(), *more, *metrics, *torch.autograd.grad(out.loss, leaves)


def chunk(scale, size=4):
    return {"max_chunk_bytes": size * scale.vocabulary * max(1, scale.tokens // 2)}


def scores(device, scale):
    inputs, labels, *_ = problem(device, *scale[:3])
    return (gk.linear_token_logprobs(*inputs, labels, backend="triton").logprobs,)


def token_logprobs(device, scale, **options):
    logits, labels, *_ = problem(device, scale.tokens, scale.vocabulary)
    leaf = logits.requires_grad_()
    out = gk.token_logprobs(leaf, labels, return_entropy=True, backend="triton", **options)
    outputs = (out.logprobs, out.entropy)
    (grad,) = torch.autograd.grad(outputs, leaf, tuple(torch.ones_like(one) for one in outputs))
    return out.logprobs.detach(), out.entropy.detach(), grad


def distilled(device, scale, beta, width=0):
    """Distill from logits, in place, or from hidden states, with 16-bit rows in the logits' memory."""
    inputs, *_ = problem(device, scale.tokens, scale.vocabulary, width)
    teacher, *_ = problem(device, scale.tokens, scale.vocabulary, 2 * width, seed=1)
    if width:
        leaves = [each.requires_grad_() for each in inputs]
        out = gk.fused_linear_distillation_loss(
            *leaves, *teacher, beta=beta, backend="triton", **chunk(scale, 8)
        )
        return results(out, leaves)
    leaf = inputs.requires_grad_()
    how = {"beta": beta, "backend": "triton", "inplace_backward": True}
    return results(gk.distillation_loss(leaf * 1.0, teacher, **how), leaf)


# --- steps, which a CUDA graph can capture: of tensors alone, none of them on the host


def inputs_of(device, scale, kind, packed, seed, dtype=torch.bfloat16):
    """Draw the tensors of a step; every seed has other masks, and packed sequences of other lengths."""
    width = scale.width if kind == "hidden" else 0
    scores, labels, old, advantages = problem(device, scale.tokens, scale.vocabulary, width, dtype, seed)
    mask = torch.arange(labels.numel(), device=device).view(labels.shape) % 3 != seed % 3
    values = {"labels": labels, "old": old, "advantages": advantages.roll(seed), "loss_mask": mask}
    values |= dict(zip(("hidden", "weight"), scores, strict=True)) if kind == "hidden" else {"logits": scores}
    values["logprobs"] = old + 3e-4
    if packed:
        values = {
            name: value if name in ("weight", "advantages") else value.flatten(0, 1)
            for name, value in values.items()
        }
        n = labels.numel()
        ends = [[0, n // 2, n // 2, n - 1, n], [0, 1, n // 3, n // 3, n]][seed % 2]
        values["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    return values


def step(kind, values, on_policy=False, **options):
    """Run forward and backward of a call on these tensors; return loss, other outputs, and gradients.
    ``policy_loss`` always takes the device's own backend.
    """
    terms = {name: values[name] for name in ("loss_mask", "cu_seqlens") if name in values}
    labels, old, advantages = (values[name] for name in ("labels", "old", "advantages"))
    if "kl_beta" in options:
        options["ref_logprobs"] = old - 0.2
    given = (None if on_policy else old, advantages)
    names = ("hidden", "weight") if kind == "hidden" else (kind,)
    leaves = [values[name].requires_grad_() for name in names]
    if kind == "logprobs":
        return results(gk.policy_loss(*leaves, *given, entropy=-old, **terms, **options), leaves)
    call = gk.fused_linear_policy_loss if kind == "hidden" else gk.fused_policy_loss
    return results(call(*leaves, labels, *given, backend="triton", **terms, **options), leaves)


def draw_and_step(device, scale, kind, packed=False, masked=False, dtype=torch.bfloat16, **options):
    values = inputs_of(device, scale, kind, packed, 0, dtype)
    if not masked:
        del values["loss_mask"]
    return step(kind, values, **(chunk(scale) if kind == "hidden" else {}), **options)


def one(kind, **options):
    return partial(draw_and_step, kind=kind, **options)


# These calls run sequence_ratio, ratio_step, logprobs_forward, logprobs_backward, logprobs_and_grad (also
# in place and narrowing in place), scale, batch_invariant_mm, divergence (in both of these ways, too).
CALLS = {
    "sequence ratio": one("logits"),
    "sequence ratio, packed, in place": one("logits", packed=True, inplace_backward=True),
    "sequence ratio, masked": one("logits", masked=True),
    "on-policy": one("logits", on_policy=True),
    "on-policy, in place": one("logits", on_policy=True, inplace_backward=True),
    "log-probs and entropy": partial(token_logprobs, temperature=0.7, softcap=20.0),
    "hidden, aligned": one("hidden", schedule="aligned"),
    "hidden, deferred": one("hidden", schedule="deferred"),
    "hidden, two_pass": one("hidden", schedule="two_pass"),
    "hidden, batch-invariant": one("hidden", batch_invariant=True),
    "hidden, on-policy, fp16": one("hidden", dtype=torch.float16, on_policy=True),
    "log-probs": one("logprobs"),
    "log-probs, on-policy": one("logprobs", on_policy=True),
    "log-probs, tokens and KL": one("logprobs", objective=gk.GRPO(), kl_beta=0.1),
    "hidden, scoring": scores,
    "forward KL, in place": partial(distilled, beta=0.0),
    "Jensen-Shannon, in place": partial(distilled, beta=0.5),
    "reverse KL, hidden": lambda device, scale: distilled(device, scale, 1.0, scale.width),
    "forward KL, hidden": lambda device, scale: distilled(device, scale, 0.0, scale.width),
}

ALL_ROWS = {"skip_inactive": "none"}
CAPTURED = [
    ("logprobs", {}),
    ("logprobs", {"objective": gk.GRPO()}),
    ("logits", {}),
    ("logits", {"on_policy": True}),
    ("logits", {"objective": gk.GSPOToken(), "return_entropy": True}),
    ("hidden", ALL_ROWS),
    ("hidden", ALL_ROWS | {"on_policy": True}),
    ("hidden", ALL_ROWS | {"objective": gk.GRPO()}),
    ("hidden", ALL_ROWS | {"schedule": "two_pass", "return_entropy": True}),
    ("hidden", ALL_ROWS | {"memory": "least"}),
]
"""What a step starts from, and its options; padded and packed."""


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        CALLS[chosen](torch.device("cuda"), Scale(8, 1000, 64, 1))
    torch.cuda.synchronize()
