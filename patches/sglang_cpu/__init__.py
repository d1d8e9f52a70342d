"""What SGLang needs to run on a machine without a GPU, where neither its kernels nor torchvision can be installed.

`stubs/` holds two top-level packages, `sgl_kernel` and `torchvision`. `eagle3-data serve` puts that folder on
PYTHONPATH of a server that it starts on a CPU, and nowhere else: they are for tests, demonstrations and small models.
"""

from __future__ import annotations

from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
"""The folder to put on PYTHONPATH."""

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
"""Makes SGLang import the CPU names of `sgl_kernel`."""
