"""ComfyUI nodes. ComfyUI reads `comfy_entrypoint` from here, or the mappings if it is older than its V3 interface."""

from __future__ import annotations

from typing import Any

from toma_diffusion.comfyui.nodes import NODES, v1_class, v3_class

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "comfy_entrypoint"]


def _has_v3() -> bool:
    try:
        from comfy_api.latest import ComfyExtension, io

        return hasattr(io, "ComfyNode") and ComfyExtension is not None
    except ImportError:
        return False


async def comfy_entrypoint() -> Any:
    """The extension, for ComfyUI's V3 interface."""
    from comfy_api.latest import ComfyExtension

    class ToMAExtension(ComfyExtension):  # type: ignore[misc]
        async def get_node_list(self) -> list[type]:
            return [v3_class(node) for node in NODES]

    return ToMAExtension()


# ComfyUI takes the mappings before it looks for `comfy_entrypoint`, unless they are None.
NODE_CLASS_MAPPINGS: dict[str, type] | None = None if _has_v3() else {node.node_id: v1_class(node) for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {node.node_id: node.display_name for node in NODES}
