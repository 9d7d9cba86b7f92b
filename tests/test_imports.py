"""Importing the library is quick: it loads torch, and nothing else that is large."""

import json
import subprocess
import sys

HEAVY = ("triton", "diffusers", "transformers", "accelerate", "numpy.random", "PIL", "rich", "typer", "toma_lab")

# A finder at the front of the path notes every attempt, so that the test also fails where a package is not installed.
PROBE = """
import json, sys

attempts = set()

class Note:
    def find_spec(self, name, path=None, target=None):
        attempts.add(name)

import torch  # what torch itself imports is not ours
sys.meta_path.insert(0, Note())
import toma_diffusion
print(json.dumps({"attempts": sorted(attempts), "cuda": torch.cuda.is_initialized()}))
"""


def test_import_is_light():
    run = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    seen = json.loads(run.stdout)
    assert "toma_diffusion.errors" in seen["attempts"]
    assert [name for name in seen["attempts"] if name.startswith(HEAVY)] == []
    assert not seen["cuda"]
