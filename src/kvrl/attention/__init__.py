"""Attention: the seam with transformers, the sampler's side and the replay."""
