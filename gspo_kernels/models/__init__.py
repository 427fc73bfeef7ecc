"""Causal language models of transformers: their head, their RoPE, and several sequences in one row."""


class IntegrationError(ValueError):
    """A framework, model or option that can't be served exactly; the message says which, and why."""
