"""Adapters to the trainers that people already have, a file each."""
