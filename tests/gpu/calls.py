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


def from_logits(device, scale, on_policy=False, packed=False, **options):
    logits, labels, old, advantages = problem(device, scale.tokens, scale.vocabulary)
    if packed:
        logits, labels, old = logits.flatten(0, 1), labels.flatten(), old.flatten()
        ends = [0, labels.numel() // 2, labels.numel() // 2, labels.numel() - 1, labels.numel()]
        options["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    leaf, old = logits.requires_grad_(), None if on_policy else old
    return results(gk.fused_policy_loss(leaf, labels, old, advantages, backend="triton", **options), leaf)


def chunk(scale, size=4):
    return {"max_chunk_bytes": size * scale.vocabulary * max(1, scale.tokens // 2), "backend": "triton"}


def from_hidden(device, scale, dtype=torch.bfloat16, on_policy=False, **options):
    inputs, labels, old, advantages = problem(device, *scale[:3], dtype)
    leaves, terms = [each.requires_grad_() for each in inputs], (None if on_policy else old, advantages)
    return results(gk.fused_linear_policy_loss(*leaves, labels, *terms, **chunk(scale), **options), leaves)


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


def from_logprobs(device, scale, on_policy=False, **options):
    """Run ``policy_loss``, which always takes the device's own backend."""
    _, _, old, advantages = problem(device, scale.tokens, 1)
    leaf = (old + 3e-4).requires_grad_()
    if "kl_beta" in options:
        options["ref_logprobs"] = old - 0.2
    old, entropy = None if on_policy else old, -old
    return results(gk.policy_loss(leaf, old, advantages, entropy=entropy, **options), leaf)


def distilled(device, scale, beta, width=0):
    """Distil from logits, in place, or from hidden states, whose 16-bit rows lie in the logits' memory."""
    inputs, *_ = problem(device, scale.tokens, scale.vocabulary, width)
    teacher, *_ = problem(device, scale.tokens, scale.vocabulary, 2 * width, seed=1)
    if width:
        leaves = [each.requires_grad_() for each in inputs]
        out = gk.fused_linear_distillation_loss(*leaves, *teacher, beta=beta, **chunk(scale, 8))
        return results(out, leaves)
    leaf = inputs.requires_grad_()
    how = {"beta": beta, "backend": "triton", "inplace_backward": True}
    return results(gk.distillation_loss(leaf * 1.0, teacher, **how), leaf)


# These calls run sequence_ratio, ratio_step, logprobs_forward, logprobs_backward, logprobs_and_grad (also
# in place and narrowing in place), scale, fixed_product, divergence (in both of these ways, too).
CALLS = {
    "sequence ratio": from_logits,
    "sequence ratio, packed, in place": partial(from_logits, packed=True, inplace_backward=True),
    "on-policy": partial(from_logits, on_policy=True),
    "on-policy, in place": partial(from_logits, on_policy=True, inplace_backward=True),
    "log-probs and entropy": partial(token_logprobs, temperature=0.7, softcap=20.0),
    "hidden, aligned": partial(from_hidden, schedule="aligned"),
    "hidden, deferred": partial(from_hidden, schedule="deferred"),
    "hidden, two_pass": partial(from_hidden, schedule="two_pass"),
    "hidden, batch-invariant": partial(from_hidden, batch_invariant=True),
    "hidden, on-policy, fp16": partial(from_hidden, dtype=torch.float16, on_policy=True),
    "log-probs": from_logprobs,
    "log-probs, on-policy": partial(from_logprobs, on_policy=True),
    "log-probs, tokens and KL": partial(from_logprobs, objective=gk.GRPO(), kl_beta=0.1),
    "hidden, scoring": scores,
    "forward KL, in place": partial(distilled, beta=0.0),
    "Jensen-Shannon, in place": partial(distilled, beta=0.5),
    "reverse KL, hidden": lambda device, scale: distilled(device, scale, 1.0, scale.width),
    "forward KL, hidden": lambda device, scale: distilled(device, scale, 0.0, scale.width),
}


# --- steps that a CUDA graph can capture: of tensors alone, none of them on the host, without a look


def inputs_of(device, scale, kind, packed, seed):
    """Draw the tensors of a step; every seed has other masks, and packed sequences of other lengths."""
    scores, labels, old, advantages = problem(
        device, scale.tokens, scale.vocabulary, scale.width if kind == "hidden" else 0, seed=seed
    )
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


def step(kind, values, **options):
    """Run forward and backward of a call on these tensors; return loss, other outputs, and gradients."""
    terms = {name: values[name] for name in ("loss_mask", "cu_seqlens") if name in values}
    labels, old, advantages = (values[name] for name in ("labels", "old", "advantages"))
    old = None if options.pop("on_policy", False) else old
    if kind == "logprobs":
        leaves = [values["logprobs"].requires_grad_()]
        return results(gk.policy_loss(*leaves, old, advantages, **terms, **options), leaves)
    if kind == "hidden":
        leaves = [values[name].requires_grad_() for name in ("hidden", "weight")]
        options |= {"skip_inactive": "none", "backend": "triton"}
        out = gk.fused_linear_policy_loss(*leaves, labels, old, advantages, **terms, **options)
        return results(out, leaves)
    leaves = [values["logits"].requires_grad_()]
    return results(gk.fused_policy_loss(*leaves, labels, old, advantages, **terms, **options), leaves)


CAPTURED = [
    ("logprobs", {}),
    ("logprobs", {"objective": gk.GRPO()}),
    ("logits", {}),
    ("logits", {"on_policy": True}),
    ("logits", {"objective": gk.GSPOToken(), "return_entropy": True}),
    ("hidden", {}),
    ("hidden", {"on_policy": True}),
    ("hidden", {"objective": gk.GRPO()}),
    ("hidden", {"schedule": "two_pass", "return_entropy": True}),
    ("hidden", {"memory": "least"}),
]
"""What a step starts from, and its options; padded and packed."""


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        CALLS[chosen](torch.device("cuda"), Scale(8, 1000, 64, 1))
    torch.cuda.synchronize()
