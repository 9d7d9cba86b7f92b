"""Forward hooks that merge tokens: a step clock, the state of a denoiser, merge sites. No model is named here."""
