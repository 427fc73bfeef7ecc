"""Validation and normalization of public arguments: terms, logit options, the head; cached decisions."""
