"""The benchmarks are tested by small runs on the CPU."""

from tests.trainer.conftest import one_thread

__all__ = ["one_thread"]
