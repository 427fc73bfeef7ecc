"""Operators over logits: log-probs, the fused sequence ratio, selected ids, divergences, score centering."""
