"""Tests of adapters use one thread, because their models are tiny."""

from tests.trainer.conftest import no_adapters_of_transformers, one_thread

__all__ = ["no_adapters_of_transformers", "one_thread"]
