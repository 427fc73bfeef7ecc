"""The policy as one module: tokens in, log-probs or a loss out.

The head runs inside ``forward``, beside the backbone, so that the hooks of DDP and FSDP see one module whose
parameters are all there while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

import gspo_kernels as gk
from gspo_kernels.trainer.rows.packing import (
    Packed,
    check_packing,
    check_sequences,
    offsets,
    packed_hidden_states,
    ranges,
)
from gspo_kernels.trainer.rows.shared_prefix import check_shared_prefix, shared_prefix_hidden_states
from gspo_kernels.trainer.run.input_errors import ModelError
from gspo_kernels.trainer.run.models import head_of


class Policy(nn.Module):
    """A causal language model that scores completions, or takes their loss, without writing logits.

    Args:
        model: a transformers causal language model; adapters may be injected into it.
        layout: "packed", "padded" or "shared_prefix": how completions become rows of the backbone.
        temperature: what completions are sampled with, and are therefore scored with.
        gradient_checkpointing: recompute each layer's activations in the backward pass.
    """

    def __init__(
        self, model: Any, *, layout: str, temperature: float, gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.layout = layout
        self.temperature = temperature
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

    def check_layout(self) -> None:
        """Refuse a model that the layout would change; a `ModelError` says why."""
        if self.layout == "packed":
            check_packing(self.model)
        if self.layout == "shared_prefix":
            check_shared_prefix(self.model)

    def forward(
        self,
        prompts: Sequence[Tensor],
        completions: Sequence[Tensor],
        terms: Mapping[str, Any] | None = None,
        return_entropy: bool = False,
    ) -> gk.TokenLogprobs | gk.LossOutput:
        """Score completions, or return the loss of `gk.fused_linear_policy_loss` if its terms are given.

        Args:
            prompts: B tensors of token ids, [P_i].
            completions: B tensors of token ids, [C_i].
            terms: keyword arguments of the loss, packed over the N completion tokens.
            return_entropy: also return each token's entropy.

        Returns:
            Packed: [N], completion after completion.
        """
        with self._checkpointing(torch.is_grad_enabled()):
            hidden, labels, cu_seqlens = self._hidden_states(prompts, completions)
        head = head_of(self.model)
        options = {"temperature": self.temperature, "return_entropy": return_entropy, **head.options()}
        if terms is None:
            return gk.linear_token_logprobs(hidden, head.weight, labels, **options)
        return gk.fused_linear_policy_loss(
            hidden, head.weight, labels, cu_seqlens=cu_seqlens, **terms, **options
        )

    @contextmanager
    def _checkpointing(self, enabled: bool) -> Iterator[None]:
        """Layers forget their activations in training mode only, where generation would lose its cache."""
        for layer in self._checkpointed:
            layer.training = enabled
        try:
            yield
        finally:
            for layer in self._checkpointed:
                layer.training = False

    def _hidden_states(self, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> Packed:
        if self.layout == "packed":
            return packed_hidden_states(self.model, prompts, completions)
        if self.layout == "padded":
            return padded_hidden_states(self.model, prompts, completions)
        pairs = list(zip(prompts, completions, strict=True))
        groups = [list(group) for _, group in groupby(pairs, lambda pair: pair[0].tolist())]
        return shared_prefix_hidden_states(
            self.model, [group[0][0] for group in groups], [[c for _, c in group] for group in groups]
        )


def padded_hidden_states(model: Any, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> Packed:
    """Run the backbone on one row per sequence, padded on the right; arguments as `packed_hidden_states`.

    Attention is causal, so what follows a sequence changes nothing in it, and no mask is needed. For models
    that cannot be packed, and for attention whose cost is quadratic in a packed row.
    """
    check_sequences(prompts, completions)
    pairs = list(zip(prompts, completions, strict=True))
    rows = [torch.cat([prompt, completion[:-1]]) for prompt, completion in pairs]
    input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    lengths = [len(completion) for completion in completions]
    firsts = [i * input_ids.shape[1] + len(prompt) - 1 for i, prompt in enumerate(prompts)]
    predicting = ranges(firsts, lengths, hidden.device)
    return Packed(
        hidden.flatten(0, 1)[predicting], torch.cat(list(completions)), offsets(lengths, hidden.device)
    )
