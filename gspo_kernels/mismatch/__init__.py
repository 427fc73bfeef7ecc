"""Comparison of log-probs of sampling and training, with the cause of differences and remedies."""
