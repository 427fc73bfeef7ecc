"""What callers pass: terms, logit options, the head, and the cache of decisions that depend on them."""
