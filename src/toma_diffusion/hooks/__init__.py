"""Forward hooks that merge tokens: the step counter, the state of a denoiser, merge sites, the handle. No model and no
method is named here."""
