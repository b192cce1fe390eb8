"""Step 2: the most that the device gives, by a copy and by the head's matrix products on random data."""

from collections.abc import Iterator
from functools import partial

import torch

from pipelines.gpu_check.results import Result
from pipelines.gpu_check.setting import Ceilings, Setting

DATA_SHEETS = {
    "B200": (8.0, 2250),
    "GH200": (4.0, 989),
    "H200": (4.8, 989),
    "H100 PCIe": (2.0, 756),
    "H100": (3.35, 989),
    "A100": (1.555, 312),
    "L40S": (0.864, 362),
    "L4": (0.3, 121),
    "A10G": (0.6, 70),
    "A10": (0.6, 125),
    "RTX 5090": (1.792, 209),
    "RTX 4090": (1.008, 165),
    "RTX 3090": (0.936, 71),
}
"""TB/s of memory and TFLOP/s of dense bfloat16 products, by a part of the device's name; the first match counts."""
COPY_SHARE, PRODUCT_SHARE = 0.85, 0.6
"""Of the data sheet."""


def measure_ceilings(setting: Setting) -> Iterator[Result]:
    """Measure and save the ceilings."""
    device, dtype = setting.device, setting.dtype
    size = 1 << (25 if setting.is_small else 31)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / setting.measure_seconds(partial(target.copy_, source))
    del source, target
    sheet = next((figures for name, figures in DATA_SHEETS.items() if name in _name_device(setting)), None)
    yield _compare(f"copy of {size >> 20} MiB", bandwidth / 1e12, sheet and COPY_SHARE * sheet[0], "TB/s")
    link = measure_link(setting)
    yield Result("copy to pinned memory of the host", f"{link / 1e9:.3g} GB/s", verdict="note", value=link / 1e9)
    tokens, width, vocabulary = (256, 128, 4096) if setting.is_small else (8192, 4096, 151_936)
    hidden, head, slopes = (
        torch.randn(shape, device=device, dtype=dtype) / 8
        for shape in ((tokens, width), (vocabulary, width), (tokens, vocabulary))
    )
    flops, seconds = 2 * tokens * width * vocabulary, []
    for name, left, right in (
        ("logits", hidden, head.t()),
        ("gradient of the hidden states", slopes, head),
        ("gradient of the head", slopes.t(), hidden),
    ):
        out = torch.empty(left.shape[0], right.shape[1], device=device, dtype=dtype)
        seconds.append(setting.measure_seconds(partial(torch.mm, left, right, out=out), 10))
        del out
        title = f"{name}: ({left.shape[0]}, {left.shape[1]}) x ({right.shape[0]}, {right.shape[1]})"
        yield _compare(title, flops / seconds[-1] / 1e12, sheet and PRODUCT_SHARE * sheet[1], "TFLOP/s")
        if not setting.is_small:  # a product in another dtype than its factors is CUDA's
            wide = setting.measure_seconds(partial(torch.mm, left, right, out_dtype=torch.float32), 10)
            yield Result(f"{name}, in float32", f"{flops / wide / 1e12:.3g} TFLOP/s", verdict="note")
    setting.save_ceilings(Ceilings(bandwidth, 3 * flops / sum(seconds), link))


def measure_link(setting: Setting) -> float:
    """Bytes per second from the device into pinned memory of the host."""
    size = 1 << (22 if setting.is_small else 28)
    source = torch.zeros(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=setting.device.type == "cuda")
    return size / setting.measure_seconds(partial(target.copy_, source))


def find_ceilings(setting: Setting) -> Ceilings:
    """The ceilings; measured unless that was done."""
    if setting.load_ceilings() is None:
        for _ in measure_ceilings(setting):
            pass
    ceilings = setting.load_ceilings()
    assert ceilings is not None
    return ceilings


def _name_device(setting: Setting) -> str:
    return "" if setting.is_small else torch.cuda.get_device_name(setting.device)


def _compare(name: str, found: float, least: float | None, unit: str) -> Result:
    if least is None:
        return Result(name, f"{found:.3g} {unit}", verdict="note", value=found)
    expected = f"{least:.3g} {unit} or more by the data sheet"
    return Result(name, f"{found:.3g} {unit}", expected, "ok" if found >= least else "missed", value=found)
