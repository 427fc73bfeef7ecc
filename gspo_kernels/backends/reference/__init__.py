"""The plain PyTorch backend, with which all other backends are compared."""
