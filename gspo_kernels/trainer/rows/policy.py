"""The policy as one module: tokens in, log-probs or a loss out.

The head runs inside ``forward``, beside the backbone, so that the hooks of DDP and FSDP see one module whose
parameters are all there while it runs. The fused loss needs the hidden states before the head and the head's
weight. What lies between raw logits and softmax (soft-capping, logit scaling) is read from the model's
config, and checked once against the model's own logits, so that a model whose head does something else is
refused instead of being trained on wrong log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.lm_head import LMHead, lm_head_of
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rollout import SamplingMask
from gspo_kernels.trainer.rows.context import Context, check_context, own_terms, shared_hidden_states
from gspo_kernels.trainer.rows.packing import (
    LossInputs,
    Tokens,
    check_packing,
    packed_hidden_states,
    padded_hidden_states,
    probe,
)
from gspo_kernels.trainer.rows.shared_prefix import check_shared_prefix, shared_prefix_hidden_states


class Policy(nn.Module):
    """A causal language model that scores completions, or takes their loss, without writing logits.

    Adapters may be injected into the model. The layout, "packed", "padded" or "shared_prefix", says how
    completions become rows of the backbone; they are scored with the temperature that they are sampled with.
    Where ``batch_invariant``, what follows from hidden states doesn't depend on what is scored along.
    With a ``context`` its processes share the tokens of a packed row: each has log-probs of its own ones, 0
    elsewhere, and the loss of all.
    """

    def __init__(
        self,
        model: Any,
        *,
        layout: str,
        temperature: float,
        batch_invariant: bool = False,
        gradient_checkpointing: bool = False,
        context: Context | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.model = model
        self.layout = layout
        self.temperature = temperature
        # None leaves it to the process
        self.batch_invariant = batch_invariant or None
        # What FSDP's wrapping of one module per layer looks up.
        self._no_split_modules = getattr(model, "_no_split_modules", None)
        # Dropout would make the ratio differ from 1 with equal weights, so it stays off in training too.
        self.eval()
        self._checkpointed: list[nn.Module] = []
        if gradient_checkpointing:
            from transformers.modeling_layers import GradientCheckpointingLayer

            name = "activation_checkpointing_enable"
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            self._checkpointed = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
            if not self._checkpointed:
                raise ModelError(f"{type(model).__name__} has no layers that could be recomputed")

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model whose head is not understood or that the layout would change.

        Runs a few tokens. A `ModelError` says why.
        """
        check_head(self.model)
        if self.layout == "packed":
            check_packing(self.model)
        if self.layout == "shared_prefix":
            check_shared_prefix(self.model)
        if self.context is not None:
            check_context(self.model, self.context)

    def forward(
        self,
        prompts: Tokens,
        completions: Tokens,
        terms: Mapping[str, Any] | None = None,
        mask: SamplingMask | None = None,
        return_entropy: bool = False,
    ) -> gk.TokenLogprobs | gk.LossOutput:
        """Score completions, or return the loss of `gk.fused_linear_policy_loss` if its terms are given.

        Both are packed over the N completion tokens, completion after completion, and so is the mask: where
        there is one, log-probs and entropy are those of the softmax over what it holds.
        """
        for layer in self._checkpointed:
            layer.training = torch.is_grad_enabled()
        (hidden, labels, cu_seqlens), where = self._hidden_states(prompts, completions)
        for layer in self._checkpointed:  # in training mode generation would lose its cache
            layer.training = False
        head = head_of(self.model)
        options = {
            "temperature": self.temperature,
            "return_entropy": return_entropy,
            "batch_invariant": self.batch_invariant,
            **head.options(),
        }
        if mask is not None:
            kept = mask.bitmask(head.weight.shape[0])
            options["kept_mask"] = kept if where is None else kept[where]
        N = sum(map(len, completions))
        out: gk.TokenLogprobs | gk.LossOutput
        if terms is None:
            out = gk.linear_token_logprobs(hidden, head.weight, labels, **options)
        else:
            if where is not None and self.context is not None:
                terms = own_terms(terms, where, N, len(completions), cu_seqlens)
                options["cp_group"] = self.context.group
            options |= {"cu_seqlens": cu_seqlens, **terms}
            out = gk.fused_linear_policy_loss(hidden, head.weight, labels, **options)
        if where is None:
            return out
        own = {"logprobs": out.logprobs, "entropy": out.entropy}.items()
        there: Any = {n: x.new_zeros(N).index_copy(0, where, x) for n, x in own if x is not None}
        return out._replace(**there)

    def _hidden_states(self, prompts: Tokens, completions: Tokens) -> tuple[LossInputs, Tensor | None]:
        """Return what the loss takes, and which completion tokens these are; None: all."""
        if self.context is not None:
            return shared_hidden_states(self.model, prompts, completions, self.context)
        if self.layout == "packed":
            return packed_hidden_states(self.model, prompts, completions), None
        if self.layout == "padded":
            return padded_hidden_states(self.model, prompts, completions), None
        pairs = list(zip(prompts, completions, strict=True))
        groups = [list(group) for _, group in groupby(pairs, lambda pair: pair[0].tolist())]
        firsts, parts = [group[0][0] for group in groups], [[c for _, c in group] for group in groups]
        return shared_prefix_hidden_states(self.model, firsts, parts), None


def head_of(model: Any) -> LMHead:
    """Find the head of a causal language model; see `lm_head_of`."""
    try:
        return lm_head_of(model)
    except IntegrationError as error:
        raise ModelError(str(error)) from error


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model whose own next-token log-probs differ from those of backbone and head taken apart."""
    prompts, completions = probe(model, [3], [4])
    inputs = padded_hidden_states(model, prompts, completions)
    head = head_of(model)
    ours = gk.linear_token_logprobs(inputs.hidden, head.weight, inputs.labels, **head.options()).logprobs
    logits = model(torch.cat([*prompts, *completions]).unsqueeze(0)).logits[0, 2:-1].float()
    theirs = logits.log_softmax(-1).gather(-1, inputs.labels.unsqueeze(-1)).squeeze(-1)
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 0.1
    difference = (ours - theirs).abs().max().item()
    if not difference <= tolerance * (1.0 + theirs.abs().max().item()):
        raise ModelError(
            f"the head of {type(model).__name__} does something that this trainer does not know: "
            f"log-probs from its hidden states and lm_head differ from the model's own by {difference:.3g}"
        )
