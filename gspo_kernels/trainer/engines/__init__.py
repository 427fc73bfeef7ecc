"""Sampling: the loop over tokens inside transformers, and a vLLM server that gets the policy's weights."""
