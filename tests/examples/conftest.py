"""Examples are tested with the trainer's tiny model, on one thread."""

from tests.trainer.conftest import forget_the_accelerator, one_thread, tokenizer

__all__ = ["forget_the_accelerator", "one_thread", "tokenizer"]
