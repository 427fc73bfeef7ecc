"""Sampling by vLLM: the requests, the service that answers them, and the way of the weights to it."""
