"""The Triton kernel compiled without a GPU: what the machine code may and may not hold, and in which order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

COMPILE = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from magrpo_kernels.row_triton import launch_shape, row_kernel

block, warps = launch_shape(151936)

def compiled(dtype, capability, *modes):
    names = row_kernel.arg_names
    pointers = {"logits_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "ids_ptr": "*i64"}
    scalars = {"stride": "i64", "out_stride": "i64", "vocabulary": "i32"}
    constants = {name: name in modes for name in ("HAS_OLD", "HAS_REF", "ENTROPY")} | {"GRADIENT": True, "BLOCK": block}
    signature = {
        name: "constexpr" if name in constants
        else pointers.get(name, "*fp32") if name.endswith("_ptr")
        else scalars.get(name, "fp32")
        for name in names
    }
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith("_ptr") or name in scalars
    }
    source = ASTSource(fn=row_kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
"""
FACTS = """
kernel = compiled(sys.argv[1], 90, *sys.argv[2:])
tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(kernel.asm["cubin"])
    file.flush()
    done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=True)
text = done.stdout + done.stderr
registers, stack = map(int, re.search(r"REG:(\\d+)\\s+STACK:(\\d+)", text).groups())
print(json.dumps({
    "registers": registers,
    "stack": stack,
    "per_element": len(re.findall(r"/\\*[0-9a-f]{4,5}\\*/ ", text)) / (block / (32 * warps)),
    "wide_loads": len(re.findall(r"LDG\\.E\\S*\\.128", text)),
    "wide_stores": len(re.findall(r"STG\\.E\\S*\\.128", text)),
    "local": len(re.findall(r"\\b(?:LDL|STL)\\b", text)),
    "double": len(re.findall(r"\\bD(?:ADD|MUL|FMA|SETP)\\b", text)),
}))
"""
# The lines of PTX, in order, that load and store elements of the row, and those at which warps wait for each other. The
# passes move vectors; the target's logit is the one element that is loaded alone.
ORDER = r"""
KINDS = {
    "target": r"ld\.global\.b16\b",
    "wait": r"bar\.sync\b",
    "store": r"st\.global\.(?:v\d\.b32|b16)\b",
}
MODES = [[], ["HAS_OLD"], ["HAS_REF"], ["ENTROPY"], ["HAS_OLD", "HAS_REF"], ["HAS_OLD", "HAS_REF", "ENTROPY"]]
orders = {}
for modes in MODES:
    lines = compiled("bf16", int(sys.argv[1]), *modes).asm["ptx"].splitlines()
    found = [kind for line in lines for kind, pattern in KINDS.items() if re.search(pattern, line)]
    orders["+".join(modes) or "REINFORCE"] = found
print(json.dumps(orders))
"""


def probe(script: str, *arguments: str) -> Any:
    """What ``script`` prints, as JSON, in a process that compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE + script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("variant", ["plain", "ratio"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_sm_90(dtype: str, variant: str) -> None:
    facts = probe(FACTS, dtype, *(["HAS_OLD"] if variant == "ratio" else []))
    assert facts["registers"] <= 48, facts
    assert facts["stack"] == facts["local"] == facts["double"] == 0, facts
    assert facts["wide_loads"] >= 2, facts
    assert facts["wide_stores"] >= 1, facts
    assert facts["per_element"] <= 30, facts  # both passes, prologue and epilogue included


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_targets_logit_is_loaded_before_a_store_may_replace_it(capability: int) -> None:
    """The gradient may go where the logits are, so a warp that is late must not find a gradient there."""
    orders = probe(ORDER, str(capability))
    assert len(orders) == 6
    for mode, order in orders.items():
        assert order.count("target") == 1, mode
        assert order[:2] == ["target", "wait"], (mode, order)
        assert order[-2:] == ["wait", "store"], (mode, order)  # the target's own, after the pass that wrote its row
