"""Sampling: by the model itself, inside transformers' generate, or by a vLLM server that gets its weights."""
