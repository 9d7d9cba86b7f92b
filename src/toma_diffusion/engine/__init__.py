"""One request of a denoiser: its step, its hooks, its handle. Knows no technique."""
