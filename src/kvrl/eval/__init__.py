"""Measuring: the oracle, the parity command, accuracy under budgets, comparisons of methods."""
