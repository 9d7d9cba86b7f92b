"""Figures of what happens inside: which tokens are chosen, what merges into what, which tokens are similar."""
