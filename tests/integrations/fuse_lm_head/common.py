"""Batches, losses from logits, and judgements, for tests of the fused head."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import gspo_kernels as gk
from gspo_kernels.integrations.transformers import fuse_lm_head
from tests import oracle
from tests.accuracy import Spread, assert_as_exact, differences
from tests.draws import shifted_seed

pytest.importorskip("transformers", reason="transformers is not installed")

IGNORED = -100
LEFT, PROMPT, COMPLETION = (3, 0, 1, 2), 4, 6
T = PROMPT + COMPLETION


def batch(seed=0, vocabulary=96):
    """Left-padded prompts, completions with padding on the right and a hole in one of them."""
    generator = torch.Generator().manual_seed(shifted_seed(seed))
    ids = torch.randint(3, vocabulary, (4, T), generator=generator)
    attention_mask = torch.ones(4, T, dtype=torch.int64)
    labels = ids.clone()
    labels[:, :PROMPT] = IGNORED
    for row, padding in enumerate(LEFT):
        attention_mask[row, :padding] = 0
    attention_mask[1, -2:] = 0
    labels[1, -2:] = IGNORED
    labels[2, PROMPT + 2] = IGNORED
    return {"input_ids": ids, "attention_mask": attention_mask}, labels


def shifted(labels):
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def terms_of(model, inputs, labels, seed=0):
    """Old log-probs such that ratios lie on both sides of GSPO's range, with a KL term beside them."""
    generator = torch.Generator().manual_seed(shifted_seed(seed))
    with torch.no_grad():
        logprobs, _ = logprobs_of(model(**inputs).logits.double(), labels)
    offsets = torch.tensor([2e-4, -3e-3, 2e-3, -1e-4]).unsqueeze(1)
    noise = 0.1 * torch.randn(logprobs.shape, generator=generator)
    return {
        "old_logprobs": (logprobs + offsets).float(),
        "advantages": torch.tensor([1.0, -0.7, 0.5, -1.2]),
        "ref_logprobs": (logprobs + noise).float(),
        "kl_beta": 0.05,
        "objective": gk.GSPO(),
    }


def logprobs_of(logits, labels):
    target = shifted(labels)
    return oracle.token_logprobs(logits, target, target != IGNORED)


def from_logits(model, inputs, labels, terms, dtype=torch.float32):
    """Loss by the oracle from the model's own logits; with fp64 the head's product and all after it are fp64.

    The backbone is the same in both, so that what is compared is the head and the loss.
    """
    head = model.get_output_embeddings()
    before = head.forward

    def precise(hidden):
        given = [hidden, head.weight] if head.bias is None else [hidden, head.weight, head.bias]
        if torch.is_autocast_enabled("cpu"):  # it rounds what a product takes, but leaves fp64 alone
            given = [each.to(torch.get_autocast_dtype("cpu")) for each in given]
        return nn.functional.linear(*(each.to(dtype) for each in given))

    head.forward = precise if dtype == torch.float64 else before
    outputs = model(**inputs)
    head.forward = before
    target = shifted(labels)
    logprobs, _ = logprobs_of(outputs.logits.to(dtype), labels)
    given = {n: v.to(dtype) if isinstance(v, torch.Tensor) else v for n, v in terms.items()}
    old, advantages, objective = (given.pop(n) for n in ("old_logprobs", "advantages", "objective"))
    loss = oracle.policy_loss(logprobs, old, advantages, target != IGNORED, objective, **given)
    if getattr(outputs, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * outputs.aux_loss
    return loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


SEEDS = range(12)


def assert_within_budget(got, plain, truth, times=2.0, eps=None):
    """Lists of {name: tensor}, one for each problem; ``eps`` is that of the results unless given.

    The backward through the model carries the same roundings of a few log-probs into every element of every
    gradient, so that a problem is one draw, however many rows its gradients have.
    """
    for name in truth[0]:
        exact, ours, theirs = ([each[name] for each in kind] for kind in (truth, got, plain))
        spread = replace(Spread.of(differences(theirs, exact), by_row=exact[0].ndim > 1), rows=1.0)
        rounding = torch.finfo(ours[0].dtype).eps if eps is None else eps
        assert_as_exact(name, differences(ours, exact), spread, exact, rounding, times)


def compared(model, terms=None, options=({},)):
    """(fused, from logits in fp32, from logits in fp64): loss and gradients of the same problems.

    ``fused`` has the list once for each of ``options``.
    """
    problems = [batch(seed) for seed in SEEDS]
    given = [terms_of(model, *problem) | (terms or {}) for problem in problems]
    plain, truth = (
        [gradients(model, from_logits(model, *p, t, dtype)) for p, t in zip(problems, given, strict=True)]
        for dtype in (torch.float32, torch.float64)
    )
    fuse_lm_head(model)
    got = [
        [
            gradients(model, model(**inputs, labels=labels, **t, **each).loss)
            for (inputs, labels), t in zip(problems, given, strict=True)
        ]
        for each in options
    ]
    return got, plain, truth
