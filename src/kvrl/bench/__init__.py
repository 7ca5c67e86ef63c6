"""`kvrl bench`: what rollouts and learning cost on this machine, as figures of one run."""
