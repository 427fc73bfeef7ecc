"""Fixtures of the trainer's tests."""

from tests.trainer.conftest import one_thread, tokenizer

__all__ = ["one_thread", "tokenizer"]
