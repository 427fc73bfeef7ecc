"""Rows, tokens, sequences and calls that the ranks of a process group share."""
