"""Skipped steps: the denoiser does not run in them, and its output is predicted from earlier ones.

`schedule` says which steps are computed, `prior` how the output of the others is predicted if nothing was learned,
`levels` reads the noise levels that both need. `front` is what stands in front of a module's call, `denoiser` that of a
denoiser, `controlnet` that of its ControlNet. A `generation` is settled when it begins, and decides step by step. The
`history` of every pass keeps outputs, which are put together to the next one.

`learning` learns steps and weights on a user's model, `next_generations` while it is used: `recording` notes whole
generations, `fitting` fits weights to them, `proposals` are tried, `store` keeps what was found.
"""
