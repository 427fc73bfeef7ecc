"""Where old log-probs come from: the trainer itself, or something that differs as an inference engine does.

Each source is a context manager around the scoring of a rollout: it gets the policy and yields
``(policy to score with, function on the log-probs)``.
"""

import copy
import re
from contextlib import contextmanager

import torch

from examples.paper.models import routers
from gspo_kernels.trainer.model import Policy


def parse(source):
    """Return the context manager of a source's name: exact, bf16, noise=SD or routing=SD."""
    if source == "exact":
        return exact
    if source == "bf16":
        return bf16_engine
    found = re.fullmatch(r"(noise|routing)=(\d*\.?\d+)", source)
    if found is None:
        raise ValueError(f"old log-probs: got {source!r}, expected exact, bf16, noise=SD or routing=SD")
    make, sd = {"noise": noise, "routing": other_routing}[found[1]], float(found[2])
    return lambda policy: make(policy, sd)


@contextmanager
def exact(policy):
    """The same path as the new log-probs: the ratio is exactly 1 before the first update."""
    yield policy, lambda logprobs: logprobs


@contextmanager
def bf16_engine(policy):
    """The same weights rounded to bf16, and run in bf16 up to the logits; routers too."""
    model = copy.deepcopy(policy.model).bfloat16()
    yield Policy(model, temperature=policy.temperature), lambda logprobs: logprobs


@contextmanager
def noise(policy, sd):
    """Independent Gaussian noise on every token's log-prob, in nats."""
    yield policy, lambda logprobs: logprobs + sd * torch.randn_like(logprobs)


@contextmanager
def other_routing(policy, sd):
    """Gaussian noise on the routers' logits, in units of their deviation over experts: other experts."""

    def reroute(router, args, output):
        logits = output[0]
        logits = logits + sd * logits.std(-1, keepdim=True) * torch.randn_like(logits)
        scores, experts = logits.softmax(-1).topk(router.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True), experts

    if not routers(policy.model):
        raise ValueError("routing: this model has no experts")
    # Before other hooks, so that a recorder sees what was used.
    hooks = [router.register_forward_hook(reroute, prepend=True) for router in routers(policy.model)]
    try:
        yield policy, lambda logprobs: logprobs
    finally:
        for hook in hooks:
            hook.remove()


class RoutingRecorder:
    """Keeps which experts each forward pass chose, [tokens, k] for each layer; use as a context manager."""

    def __init__(self, model):
        self.passes = []
        self.routers = routers(model)

    def __enter__(self):
        self.hooks = [router.register_forward_hook(self._record) for router in self.routers]
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def _record(self, router, args, output):
        if router is self.routers[0]:
            self.passes.append([])
        self.passes[-1].append(output[2].detach())


def changed_experts(before, after):
    """Return the share of activated experts that the other pass did not activate, over tokens and layers."""
    kept = [
        (old.unsqueeze(-1) == new.unsqueeze(-2)).any(-1).double().mean()
        for old, new in zip(before, after, strict=True)
    ]
    return 1.0 - float(torch.stack(kept).mean())
