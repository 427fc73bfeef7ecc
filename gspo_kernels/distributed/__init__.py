"""Process groups: tokens and sequences that their ranks share, and arguments that they compare."""
