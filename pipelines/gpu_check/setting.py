"""What every step is given: the device, the configuration and a folder; how it measures time."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from magrpo.config.run import RunConfig
from magrpo.engines.auto import AutoEngine
from magrpo.interfaces import EnginePlugin
from magrpo.model.lineup import dtype_of


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that this device gives."""

    copy_bytes_per_s: float
    """Read and written by a copy."""
    flops: float
    """Floating-point operations per second of the head's matrix products."""
    link_bytes_per_s: float
    """From the device into pinned memory of the host."""


@dataclass(frozen=True)
class Setting:
    """What every step is given."""

    config: RunConfig
    """Its models live on ``device``."""
    device: torch.device
    folder: Path
    """For the files of all steps."""

    @property
    def is_small(self) -> bool:
        """Whether steps run with small sizes: without a GPU they show that they work, and nothing else."""
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is measured without a model."""
        return torch.float32 if self.is_small else torch.bfloat16

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of the models' matrix products."""
        return dtype_of(self.config.model, self.device)

    @property
    def engine(self) -> EnginePlugin:
        """The engine of the configuration, chosen if it is ``auto``."""
        plugin = self.config.engine
        return plugin.choose_engine(self.device) if isinstance(plugin, AutoEngine) else plugin

    def count_free_bytes(self) -> int:
        """Free memory of the GPU."""
        return torch.cuda.mem_get_info(self.device)[0]

    def wait_for_device(self) -> None:
        """Wait until the GPU has done everything."""
        if not self.is_small:
            torch.cuda.synchronize(self.device)

    def measure_seconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """The median time of ``run``, after two warm-ups; on a GPU between events."""
        for _ in range(2):
            run()
        self.wait_for_device()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            if self.is_small:
                run()
                seconds.append(time.perf_counter() - began)
            else:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
                events[0].record()
                run()
                events[1].record()
                self.wait_for_device()
                seconds.append(events[0].elapsed_time(events[1]) / 1e3)
        return statistics.median(seconds)

    def save_ceilings(self, ceilings: Ceilings) -> None:
        """For later steps, which may run in other processes."""
        (self.folder / "ceilings.json").write_text(json.dumps(asdict(ceilings)), encoding="utf-8")

    def load_ceilings(self) -> Ceilings | None:
        """The ceilings, if they were measured."""
        path = self.folder / "ceilings.json"
        return Ceilings(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
