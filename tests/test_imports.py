"""What importing the package may and may not set off."""

import json
import subprocess
import sys

FORBIDDEN = ("triton", "diffusers", "transformers", "matplotlib", "numpy.random", "PIL", "typer", "rich")

# A finder at the front of the path notes every attempt, so that the test also fails where a package is not installed.
PROBE = """
import json, sys

attempts = set()

class Note:
    def find_spec(self, name, path=None, target=None):
        attempts.add(name)

import torch  # what torch itself imports is not ours
sys.meta_path.insert(0, Note())
{statement}
print(json.dumps({{"attempts": sorted(attempts), "cuda": torch.cuda.is_initialized()}}))
"""


def probe(statement: str) -> dict:
    code = PROBE.format(statement=statement)
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def forbidden_in(attempts: list[str]) -> list[str]:
    return [name for name in attempts if name.startswith(FORBIDDEN)]


def test_import_is_light():
    seen = probe("import toma_diffusion")
    assert "toma_diffusion.ops.reference" in seen["attempts"]
    assert forbidden_in(seen["attempts"]) == []
    assert not seen["cuda"]


def test_probe_sees_attempts_that_fail():
    """The test above can fail: an attempt is noted even if the package is missing."""
    seen = probe("import contextlib\nwith contextlib.suppress(ImportError): import triton.language_that_is_not_there")
    assert forbidden_in(seen["attempts"])


def test_public_names_are_there():
    import toma_diffusion

    assert all(hasattr(toma_diffusion, name) for name in toma_diffusion.__all__)
