"""Backends by name: Triton, C++ and plain PyTorch."""
