"""The sampler: rollouts in a fixed KV budget."""
