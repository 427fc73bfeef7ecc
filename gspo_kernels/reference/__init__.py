"""The plain PyTorch backend, which every other one is compared with."""
