"""The tiny models and the tokenizer are the trainer's."""

from tests.trainer.conftest import one_thread, tokenizer

__all__ = ["one_thread", "tokenizer"]
