"""Serves the page on this machine alone, and keeps its files in one folder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from toma_diffusion import UsageError
from toma_lab.playground.comparison import Comparer
from toma_lab.playground.models import Models
from toma_lab.playground.search import Searches

HOST = "127.0.0.1"
"""Other machines cannot reach the page."""
PORTS = range(1024, 65536)
STYLE = Path(__file__).parent / "assets" / "page.css"
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; media-src 'self' data: blob:; worker-src 'self' blob:"
)
"""The browser loads nothing from elsewhere, whatever gradio's own page asks for."""
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
"""Those of the machine: gradio's own come from a server."""


def serve(models: Models, folder: Path, port: int) -> tuple[Any, str]:
    """Serve the page from a thread. Returns it, with its methods `block_thread()` and `close()`, and its address."""
    if port not in PORTS:
        raise UsageError(f"port {port} is not allowed: use one from {PORTS[0]} to {PORTS[-1]}.")
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware

    from toma_lab.playground.page import build_page

    async def add_policy(request: Any, answer: Callable[[Any], Awaitable[Any]]) -> Any:
        response = await answer(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response

    page = build_page(Comparer(models), Searches(models, folder / "tune"))
    try:
        _, address, _ = page.queue(api_open=False).launch(
            server_name=HOST,
            server_port=port,
            share=False,
            ssr_mode=False,
            run_history=False,
            footer_links=[],
            theme=gr.themes.Default(primary_hue="orange", neutral_hue="slate", **FONTS),
            css=STYLE.read_text(encoding="utf-8"),
            allowed_paths=[str((folder / "tune").resolve())],
            app_kwargs={"middleware": [Middleware(BaseHTTPMiddleware, dispatch=add_policy)]},
            show_error=True,
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:
        raise UsageError(f"port {port} cannot be used ({error}): give another --port.") from error
    return page, address
