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

block, warps = launch_shape(151936)  # as of 50257, the odd vocabulary
FLAGS = ("HAS_OLD", "HAS_REF", "HAS_GROUPS", "HAS_CAP", "STD")
thread_elements = block // (32 * warps)

def compiled(dtype, capability, *modes, odd=False):
    names = row_kernel.arg_names
    pointers = {
        "logits_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "returns_ptr": "*fp64",
        **{name + "_ptr": "*i64" for name in ("ids", "sequences", "starts", "ends")},
    }
    scalars = {"stride": "i64", "out_stride": "i64", "vocabulary": "i32"}
    constants = {name: name in modes for name in FLAGS} | {
        "GRADIENT": True, "BLOCK": block, "LANES": {"bf16": 8, "fp32": 4}[dtype],
    }
    signature = {
        name: "constexpr" if name in constants
        else pointers.get(name, "*fp32") if name.endswith("_ptr")
        else scalars.get(name, "fp32")
        for name in names
    }
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith("_ptr") or (name in scalars and not odd)
    }
    source = ASTSource(fn=row_kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
"""
# Of each variant: its resources, its loops (instructions for each element, barriers, shuffles, accesses), and the order
# in which PTX loads and stores elements of the row and waits at barriers. The passes move vectors, of an odd vocabulary
# single elements; scalars beside the row, such as losses, are of other sizes than bfloat16.
FACTS = r"""
tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ELEMENTS = r"\.global\.(?:L\d::\w+\.)*(?:v\d\.b32|b16)\b"  # after hints to the caches
KINDS = {"load": "ld" + ELEMENTS, "wait": r"bar\.sync\b", "store": "st" + ELEMENTS}
MODES = [[], ["HAS_GROUPS", "HAS_CAP", "STD"], ["HAS_OLD", "HAS_REF"]]

def inspect(dtype, capability, modes, odd=False):
    kernel = compiled(dtype, capability, *modes, odd=odd)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    registers, stack = map(int, re.search(r"REG:(\d+)\s+STACK:(\d+)", text).groups())
    lines = [(int(place, 16), line) for place, line in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);", text)]
    loops = []
    for end, line in lines:
        jump = re.search(r"\bBRA\b.*0x([0-9a-f]+)", line)
        if jump and int(jump[1], 16) < end:
            body = [line for place, line in lines if int(jump[1], 16) <= place <= end]
            loop = " ".join(body)
            loops.append({
                "per_element": len(body) / thread_elements,
                "exponentials": len(re.findall(r"\bMUFU\.EX2\b", loop)),
                "barriers": len(re.findall(r"\bBAR\b", loop)),
                "shuffles": len(re.findall(r"\bSHFL\b", loop)),
                "loads": re.findall(r"LDG\.E\S*", loop),
                "stores": re.findall(r"STG\.E\S*", loop),
            })
    whole = " ".join(line for _, line in lines)
    ptx = kernel.asm["ptx"].splitlines()
    order = [kind for line in ptx for kind, pattern in KINDS.items() if re.search(pattern, line)]
    return {
        "registers": registers,
        "stack": stack,
        "local": len(re.findall(r"\b(?:LDL|STL)\b", whole)),
        "double": len(re.findall(r"\bD(?:ADD|MUL|FMA|SETP)\b", whole)),
        "loops": loops,
        "order": order,
    }

capability = int(sys.argv[1])
if takes_all := capability != 90:  # 90 is for the fast tests: the variants with most terms
    MODES += [["HAS_OLD"], ["HAS_GROUPS"]]
facts = {"+".join(modes) or "REINFORCE": inspect("bf16", capability, modes) for modes in MODES}
facts["float32"] = inspect("fp32", capability, [])
if takes_all:
    facts["odd"] = inspect("bf16", capability, [], odd=True)
facts["odd+HAS_OLD+HAS_REF"] = inspect("bf16", capability, ["HAS_OLD", "HAS_REF"], odd=True)
print(json.dumps(facts))
"""


OTHERS = [pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 100, 120)]


@pytest.fixture(scope="module", params=[90, *OTHERS])
def variants(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The facts of every variant for one architecture."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE + FACTS, str(request.param)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(facts) == (5 if request.param == 90 else 8)
    return facts


def test_registers_are_few_and_none_spill(variants: dict[str, Any]) -> None:
    for name, facts in variants.items():
        # An odd vocabulary: no vectors, an address for each element; two programs still fit on a multiprocessor.
        assert facts["registers"] <= (128 if name.startswith("odd") else 48), (name, facts)
        assert facts["stack"] == facts["local"] == 0, (name, facts)
        assert facts["double"] == 0 or "HAS_GROUPS" in name, (name, facts)


def test_the_passes_move_16_bytes_at_a_time_and_never_wait(variants: dict[str, Any]) -> None:
    """An instruction budget: what memory leaves free is 13.8 an element on an H200, 9 on a B200."""
    for name, facts in variants.items():
        if name.startswith("odd"):
            continue  # its rows begin anywhere: each element is moved alone
        first, second = (loop for loop in facts["loops"] if loop["exponentials"])
        for loop in (first, second):
            assert loop["barriers"] == loop["shuffles"] == 0, (name, loop)
            assert loop["loads"], (name, loop)
            assert all(access.endswith(".128") for access in loop["loads"] + loop["stores"]), (name, loop)
        assert not first["stores"], (name, first)
        assert second["stores"], (name, second)
        assert first["per_element"] <= 9, (name, first)
        assert second["per_element"] <= 9.5, (name, second)


def test_the_targets_logit_is_loaded_before_a_store_may_replace_it(variants: dict[str, Any]) -> None:
    """The gradient may go where the logits are, so a warp that is late must not find a gradient there."""
    for name, facts in variants.items():
        if name == "float32":
            continue  # other scalars are loaded by the same instruction
        order = facts["order"]
        # 16 elements of a thread in a block, of the loop and of the rest of the row: in vectors of 8, or each alone.
        moved = 2 * (16 if name.startswith("odd") else 2)
        wait = order.index("wait")
        assert order[:wait] == ["load"] * (1 + moved), (name, order)  # the target's and the first pass's
        assert order[wait:].count("load") == moved, (name, order)
        assert order[wait:].count("store") == moved + 1, (name, order)
        assert order[-2:] == ["wait", "store"], (name, order)  # the target's own, after the pass that wrote its row
