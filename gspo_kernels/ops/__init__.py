"""Operators over logits, how operators are registered, and the table of backends."""
