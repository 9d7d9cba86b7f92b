"""Skipped steps: the denoiser does not run in them, and its output is predicted from earlier ones.

`schedule` says which steps are computed, `prior` how the output of the others is predicted if nothing was learned,
`levels` reads the noise levels that both need, `learning` fits weights on a user's model, `history` keeps outputs and
puts them together, and `denoiser` stands in front of the model's call.
"""
