"""Tests of models use one thread, because their models are tiny."""

from tests.trainer.conftest import one_thread

__all__ = ["one_thread"]
