"""Benchmarks that a sceptic can run again: ``python -m benchmarks --help``, from the root of a checkout."""
