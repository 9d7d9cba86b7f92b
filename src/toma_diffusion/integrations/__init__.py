"""Other programs than diffusers that run diffusion models. None of them is imported with the package."""
