"""The models of the adapters' tests are tiny."""

from tests.trainer.conftest import one_thread

__all__ = ["one_thread"]
