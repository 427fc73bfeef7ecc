"""From logits: operators, autograd functions, the fused sequence ratio, selected ids, vocabulary shards."""
