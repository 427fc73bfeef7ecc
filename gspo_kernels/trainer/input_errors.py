"""What can be wrong with what a person gave to the trainer. The messages say what to change."""

from __future__ import annotations


class InputError(ValueError):
    """Something given to the trainer cannot be used; no work was lost."""


class ConfigError(InputError):
    """A configuration that cannot be run; the message names the key."""


class DataError(InputError):
    """A dataset that cannot be used; the message names the file and the row."""


class RewardError(InputError):
    """A reward or feedback function that cannot be found or returned something else; the message names it."""


class ModelError(InputError):
    """A model or tokenizer that this trainer cannot train."""


class EngineError(InputError):
    """A sampling engine that cannot be reached, or answers otherwise than asked; the message names it."""


class RunDirectoryError(InputError):
    """A run directory that cannot be used as asked; nothing that was whole in it is lost."""
