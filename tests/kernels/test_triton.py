"""The Triton kernel: in the interpreter on a CPU (a process of its own), on real shapes on a GPU."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from magrpo_kernels import LossOptions
from magrpo_kernels.row import row_loss
from tests.kernels.oracle import token_inputs

TRITON, NUMPY = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
CONVERSION = "ignore:Conversion of an array with ndim:DeprecationWarning"
WARNINGS = ("-W", CONVERSION) if TRITON < (3, 7) else ()
"""Of the interpreter of triton 3.6, which takes arrays for numbers."""

if torch.cuda.is_available():
    from tests.kernels.triton_cases import *  # noqa: F403

    pytestmark = pytest.mark.gpu  # what `pytest -m gpu` selects
else:

    @pytest.mark.skipif(
        TRITON < (3, 7) and NUMPY >= (2, 4), reason="the interpreter of triton 3.6 needs a NumPy before 2.4"
    )
    def test_all_cases_in_the_interpreter() -> None:
        # Triton decides when it is imported whether kernels are interpreted; other tests import it for real.
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        cases = Path(__file__).with_name("triton_cases.py")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *WARNINGS,
            str(cases),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        assert " passed" in done.stdout
        assert " skipped" not in done.stdout


@pytest.mark.usefixtures("gpu")
def test_where_there_is_a_gpu_the_cases_are_marked() -> None:
    there = runpy.run_path(__file__)
    assert there["pytestmark"].name == "gpu"
    assert sum(name.startswith("test_") for name in there) > 10


@pytest.mark.gpu
def test_offsets_past_32_bits() -> None:
    vocabulary = 151_936
    num_tokens = 2**31 // vocabulary + 8
    logits = torch.zeros(num_tokens, vocabulary, dtype=torch.bfloat16, device="cuda")
    ids = torch.full((num_tokens,), 3, device="cuda")
    inputs = token_inputs(ids, torch.ones(num_tokens, device="cuda"))
    _, logps = row_loss(logits, inputs, LossOptions(impl="triton"), logits)
    torch.testing.assert_close(logps, torch.full_like(logps, -torch.tensor(float(vocabulary)).log().item()))
    assert logits[-1, 3].item() < -0.9
    assert logits[-1, 4].item() > 0
