"""The plain PyTorch backend, the reference for all other backends."""
