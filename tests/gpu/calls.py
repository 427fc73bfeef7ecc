"""One call of every kernel, through the functions that users call.

``python -m tests.gpu.calls NAME...`` runs some of them on a small case, for compute-sanitizer.
"""

import sys
from typing import NamedTuple

import torch

import gspo_kernels as gk
from tests.draws import shifted_seed

B = 4
"""Sequences: of equal length, or packed with an empty one among them."""


class Scale(NamedTuple):
    """Sizes of a test: what a GPU does in seconds, or what the interpreter does."""

    tokens: int
    vocabulary: int
    width: int
    runs: int


def problem(device, tokens, vocabulary, width=0, dtype=torch.bfloat16, seed=0):
    """(logits or (hidden, weight), labels, old, advantages); a few tokens are ignored."""
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


def from_logits(device, scale, on_policy=False, packed=False, in_place=False, **options):
    logits, labels, old, advantages = problem(device, scale.tokens, scale.vocabulary)
    layout = {}
    if packed:
        logits, labels, old = logits.flatten(0, 1), labels.flatten(), old.flatten()
        ends = [0, labels.numel() // 2, labels.numel() // 2, labels.numel() - 1, labels.numel()]
        layout["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    leaf = logits.requires_grad_()
    terms = (labels, None if on_policy else old, advantages)
    out = gk.fused_policy_loss(leaf, *terms, **layout, inplace_backward=in_place, backend="triton", **options)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out.loss.detach(), out.logprobs, *out.metrics.values(), grad


def from_hidden(device, scale, dtype=torch.bfloat16, on_policy=False, **options):
    (hidden, weight), labels, old, advantages = problem(
        device, scale.tokens, scale.vocabulary, scale.width, dtype
    )
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    terms = (labels, None if on_policy else old, advantages)
    chunk = 4 * scale.vocabulary * max(1, scale.tokens // 2)
    out = gk.fused_linear_policy_loss(*leaves, *terms, max_chunk_bytes=chunk, backend="triton", **options)
    return out.loss.detach(), out.logprobs, *torch.autograd.grad(out.loss, leaves)


def scores(device, scale, **options):
    (hidden, weight), labels, *_ = problem(device, scale.tokens, scale.vocabulary, scale.width)
    with torch.no_grad():
        return tuple(
            value
            for value in gk.linear_token_logprobs(hidden, weight, labels, backend="triton", **options)
            if value is not None
        )


def token_logprobs(device, scale, **options):
    logits, labels, *_ = problem(device, scale.tokens, scale.vocabulary)
    leaf = logits.requires_grad_()
    out = gk.token_logprobs(leaf, labels, return_entropy=True, backend="triton", **options)
    outputs = (out.logprobs, out.entropy)
    (grad,) = torch.autograd.grad(outputs, leaf, tuple(torch.ones_like(one) for one in outputs))
    return out.logprobs.detach(), out.entropy.detach(), grad


def from_logprobs(device, scale, on_policy=False, **options):
    """The device's own backend: this entry leaves no choice."""
    _, _, old, advantages = problem(device, scale.tokens, 1)
    leaf = (old + 3e-4).requires_grad_()
    if "kl_beta" in options:
        options["ref_logprobs"] = old - 0.2
    out = gk.policy_loss(leaf, None if on_policy else old, advantages, entropy=-old, **options)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out.loss.detach(), *out.metrics.values(), grad


def distilled(device, scale, beta, width=0):
    """From logits over themselves, or from hidden states, whose 16-bit rows lie in the logits' memory."""
    inputs, *_ = problem(device, scale.tokens, scale.vocabulary, width)
    teacher, *_ = problem(device, scale.tokens, scale.vocabulary, 2 * width, seed=1)
    options = {"beta": beta, "backend": "triton"}
    if width:
        leaves = tuple(each.requires_grad_() for each in inputs)
        chunk = 8 * scale.vocabulary * max(1, scale.tokens // 2)
        out = gk.fused_linear_distillation_loss(*leaves, *teacher, max_chunk_bytes=chunk, **options)
    else:
        leaves = (inputs.requires_grad_(),)
        out = gk.distillation_loss(inputs * 1.0, teacher, inplace_backward=True, **options)
    return out.loss.detach(), out.divergence, *torch.autograd.grad(out.loss, leaves)


# Which kernels: sequence_ratio, ratio_step, logprobs_forward, logprobs_backward, logprobs_and_grad (also
# in place and narrowing in place), scale, divergence (in both ways, too).
CALLS = {
    "sequence ratio": from_logits,
    "sequence ratio, packed, in place": lambda *to: from_logits(*to, packed=True, in_place=True),
    "on-policy": lambda *to: from_logits(*to, on_policy=True),
    "on-policy, in place": lambda *to: from_logits(*to, on_policy=True, in_place=True),
    "log-probs and entropy": lambda *to: token_logprobs(*to, temperature=0.7, softcap=20.0),
    "hidden, aligned": lambda *to: from_hidden(*to, schedule="aligned"),
    "hidden, deferred": lambda *to: from_hidden(*to, schedule="deferred"),
    "hidden, two_pass": lambda *to: from_hidden(*to, schedule="two_pass"),
    "hidden, on-policy, fp16": lambda *to: from_hidden(*to, dtype=torch.float16, on_policy=True),
    "log-probs": from_logprobs,
    "log-probs, on-policy": lambda *to: from_logprobs(*to, on_policy=True),
    "log-probs, tokens and KL": lambda *to: from_logprobs(*to, objective=gk.GRPO(), kl_beta=0.1),
    "scoring": scores,
    "forward KL, in place": lambda *to: distilled(*to, 0.0),
    "Jensen-Shannon, in place": lambda *to: distilled(*to, 0.5),
    "reverse KL, hidden": lambda device, scale: distilled(device, scale, 1.0, scale.width),
    "forward KL, hidden": lambda device, scale: distilled(device, scale, 0.0, scale.width),
}


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        CALLS[chosen](torch.device("cuda"), Scale(8, 1000, 64, 1))
    torch.cuda.synchronize()
