"""The Triton kernel compiled for sm_90 without a GPU: what the machine code may and may not hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from magrpo_kernels.row_triton import launch_shape, row_kernel

dtype, ratio = sys.argv[1], sys.argv[2] == "ratio"
names = row_kernel.arg_names
pointers = {"logits_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "ids_ptr": "*i64"}
scalars = {"stride": "i64", "out_stride": "i64", "vocabulary": "i32"}
block, warps = launch_shape(151936)
constants = {"HAS_OLD": ratio, "HAS_REF": ratio, "GRADIENT": True, "ENTROPY": False, "BLOCK": block}
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
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
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


@pytest.mark.parametrize("variant", ["plain", "ratio"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_sm_90(dtype: str, variant: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROBE, dtype, variant]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["registers"] <= 48, facts
    assert facts["stack"] == facts["local"] == facts["double"] == 0, facts
    assert facts["wide_loads"] >= 2, facts
    assert facts["wide_stores"] >= 1, facts
    assert facts["per_element"] <= 30, facts  # both passes, prologue and epilogue included
