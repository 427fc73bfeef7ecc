"""How log-probs of sampling and training differ, where the difference comes from, and what to do about it."""
