"""Layers that ``triton.kernelize`` can put in the place of a model's own.

A layer of the hub is a forward alone: its parameters are those of the module that it replaces, and the
arguments have to be that module's, in the same order.
"""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

from torch import Tensor, nn

from gspo_kernels.logprobs import linear_token_logprobs, token_logprobs

__all__ = ["LinearTokenLogprobs", "TokenLogprobs"]


class TokenLogprobs(nn.Module):
    """In the place of a module that computes log-probs of labels from logits."""

    can_torch_compile = True

    def forward(self, logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """Log-probs of the labels.

        Args:
            logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64.
            labels: [B, T] or [N]; -100 where there is none.
            temperature: divides the logits; one for all or one for each sequence [B].

        Returns:
            Log-probs in nats, the labels' shape, fp32 (fp64 for fp64 logits); 0.0 where there is no label.
        """
        return token_logprobs(logits, labels, temperature=temperature).logprobs


class LinearTokenLogprobs(nn.Module):
    """In the place of an output layer with ``weight`` [V, H] and ``bias`` [V] or None, called with labels."""

    can_torch_compile = True

    def forward(self, hidden: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """Log-probs of the labels; the logits exist a chunk at a time.

        Args:
            hidden: [B, T, H] or [N, H], in the weight's dtype.
            labels: [B, T] or [N]; -100 where there is none.
            temperature: divides the logits; one for all or one for each sequence [B].

        Returns:
            Log-probs in nats, the labels' shape, fp32 (fp64 for fp64 hidden states); 0.0 where there is no
            label.
        """
        return linear_token_logprobs(
            hidden, self.weight, labels, bias=self.bias, temperature=temperature
        ).logprobs
