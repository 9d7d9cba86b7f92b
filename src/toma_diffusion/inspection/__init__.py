"""Looking into a model while it draws: which tokens are chosen, what merges into what, where tokens are alike."""
