"""Put this folder, or a link to it, into ComfyUI's custom_nodes. The nodes themselves are in the package."""

try:
    from toma_diffusion.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
except ImportError as error:
    raise ImportError(
        "The ToMA nodes need the package toma-diffusion in the Python that runs ComfyUI. "
        "Install it with that Python, in a clone of its repository: python -m pip install ."
    ) from error

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
