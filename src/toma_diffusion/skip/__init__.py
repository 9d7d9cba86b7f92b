"""Skipped steps: the denoiser does not run in them, and its output is predicted from earlier ones.

`schedule` says which steps are computed, `prior` how the output of the others is predicted if nothing was learned,
`levels` reads the noise levels that both need. `history` keeps outputs and puts them together. `denoiser` decides for a
model and `controlnet` for its ControlNet; `front` is how either stands in front of the module's call.

`learning` learns steps and weights on a user's model: `recording` notes whole generations, `fitting` fits weights to
them, `store` keeps what was found.
"""
