"""Nodes for ComfyUI, which reads the two mappings from here. `nodes` says what they do, `sampling` how."""

from __future__ import annotations

from toma_diffusion.comfyui.nodes import NODES

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

NODE_CLASS_MAPPINGS: dict[str, type] = {node.ID: node for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {node.ID: node.NAME for node in NODES}
