"""Small runs on the CPU test the benchmarks, with one thread."""

from tests.trainer.conftest import one_thread

__all__ = ["one_thread"]
