"""Process groups, sharding of vocabulary, sequences and tokens, and comparison of arguments across ranks."""
