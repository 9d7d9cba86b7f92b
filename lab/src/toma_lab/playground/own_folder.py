"""Keeps what other packages write in the folder of the page. It imports none of them."""

from __future__ import annotations

import os
from pathlib import Path

from toma_diffusion.files import check_writable


def keep_files_in(folder: Path) -> None:
    """Have gradio and matplotlib keep their files in a folder, and gradio send nothing to its makers. They read this
    when they are imported, which metrics do too: call it first."""
    for name, variable in (("gradio", "GRADIO_TEMP_DIR"), ("matplotlib", "MPLCONFIGDIR")):
        check_writable(folder / name / "file")
        os.environ[variable] = str((folder / name).resolve())
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
