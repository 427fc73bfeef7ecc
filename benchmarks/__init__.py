"""Reproducible benchmarks: run ``python -m benchmarks --help`` from the root of a checkout."""
