"""Benchmark of the loss from hidden states against its floor, eager torch and other libraries, all in one run.

Every implementation computes the same gradient, that of ``-sum(advantage * logp)`` of sampled tokens with respect to
the hidden states and, unless frozen, the head; an implementation with another gradient is not timed. Each round runs
all of them, so that a slow moment of the machine affects all; medians are reported. The floor is the bare matrix
products, in the same chunks. CoMLRL is left out: its loss cannot be called apart from its trainer.
"""

import argparse
import contextlib
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from magrpo_kernels import LossOptions, TokenInputs, policy_loss_from_hidden
from magrpo_kernels.hidden import add_product_, slice_chunks
from magrpo_kernels.inputs import Impl

MIB = 1 << 20
DTYPES = {True: "bfloat16", False: "float32"}
FLOOR = "bare matrix products (floor)"
OURS = "magrpo_kernels"
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative, of the norm of a gradient."""
LIBRARIES = {
    "Liger fused linear GRPO": "liger_kernel.chunked_loss",
    "TRL chunked log-probabilities": "trl.kernels",
    "cut-cross-entropy": "cut_cross_entropy",
}
"""The modules of other implementations."""
MISSING = (ImportError, AttributeError, RuntimeError, ValueError, TypeError, AssertionError)
"""Errors of a library that is not installed, or does not support this device."""


@dataclass(frozen=True, slots=True)
class Case:
    """The tensors of one measurement: S sequences of equal length, N tokens in all."""

    name: str
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    token_ids: Tensor  # (N,)
    advantages: Tensor  # (S,)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that need gradients."""
        return [tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad]

    @property
    def coefficients(self) -> Tensor:
        """(N,): the advantage of each token's sequence."""
        return self.advantages.repeat_interleave(len(self.hidden) // len(self.advantages))


Loss = Callable[[Case], Tensor]


@dataclass(slots=True)
class Row:
    """The seconds and extra bytes that one implementation took, or why it was skipped."""

    name: str
    forward_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    gradient_norm: float = 0.0
    skipped: str = ""


def make_case(name: str, args: argparse.Namespace, *, frozen: bool = False, degenerate: float = 0.0) -> Case:
    """Random inputs; a fraction ``degenerate`` of the sequences has advantage 0, as if their group were all equal."""
    place = {"device": torch.device(args.device), "dtype": getattr(torch, args.dtype)}
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(args.sequences, generator=generator)
    advantages[: int(degenerate * args.sequences)] = 0.0
    ids = torch.randint(args.vocabulary, (args.tokens,), generator=generator)
    weight = torch.randn(args.vocabulary, args.hidden, generator=generator) * args.hidden**-0.5
    hidden = torch.randn(args.tokens, args.hidden, generator=generator)
    return Case(
        name,
        hidden.to(**place).requires_grad_(),
        weight.to(**place).requires_grad_(not frozen),
        ids.to(args.device),
        advantages.to(args.device),
    )


# ------------------------------------------------------------------------------------------------- implementations
def our_loss(case: Case, impl: Impl) -> Tensor:
    """This package."""
    inputs = TokenInputs(case.token_ids, case.coefficients)
    return policy_loss_from_hidden(case.hidden, case.weight, inputs, LossOptions(impl=impl)).loss


def eager_loss(case: Case) -> Tensor:
    """All logits, log_softmax, gather, autograd."""
    logps = (case.hidden @ case.weight.t()).float().log_softmax(-1).gather(1, case.token_ids[:, None]).squeeze(1)
    return -(case.coefficients * logps).sum()


@functools.cache
def compile_eager_loss() -> Loss:
    """The same under torch.compile."""
    return torch.compile(eager_loss, dynamic=False)


def liger_loss(case: Case) -> Any:
    """Liger's fused linear GRPO loss, one sequence at a time. On-policy its ratio is 1, its gradient the same."""
    options = {"beta": 0.0, "compiled": False, "use_ref_model": False, "chunk_size": 1, "loss_type": "grpo"}
    grpo = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(temperature=1.0, **options)
    count = len(case.advantages)
    hidden, ids = case.hidden.view(count, -1, case.hidden.shape[1]), case.token_ids.view(count, -1)
    mean = grpo(hidden, case.weight, ids, torch.ones_like(ids), case.advantages)[0]
    return mean * len(case.hidden)  # from its mean over sequences of means over tokens


def trl_loss(case: Case) -> Any:
    """TRL's chunked head, with the loss on top."""
    apply = importlib.import_module("trl.kernels").ChunkedLogProbFunction.apply
    logps = apply(case.hidden, case.weight, None, case.token_ids, 1.0, 32768, None, 1.0, ())[0]
    return -(case.coefficients * logps.float()).sum()


def cut_cross_entropy_loss(case: Case) -> Any:
    """cut-cross-entropy's per-token losses, weighted, nothing filtered."""
    options = {"filter_eps": None} if case.hidden.is_cuda else {"impl": "torch_compile"}
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    losses = function(case.hidden, case.weight, case.token_ids, reduction="none", **options)
    return (case.coefficients * losses.float()).sum()


def matrix_products(case: Case) -> Tensor:
    """The matrix products that every implementation needs, and nothing else; their results are discarded."""
    hidden, weight = case.hidden.detach(), case.weight.detach()
    to_rows = torch.empty_like(hidden)
    total = torch.zeros_like(weight, dtype=torch.float32) if case.weight.requires_grad else None
    parts = slice_chunks(len(hidden), weight)
    buffer = hidden.new_empty(parts[0].stop, len(weight))
    for part in parts:
        logits = torch.mm(hidden[part], weight.t(), out=buffer[: part.stop - part.start])
        torch.mm(logits, weight, out=to_rows[part])
        if total is not None:
            add_product_(total, logits.t(), hidden[part])
    return to_rows[0, 0]


def list_implementations(device: str) -> dict[str, Loss]:
    """The implementations compared on this device, by name."""
    on_cuda: dict[str, Loss] = {f"{OURS} triton": functools.partial(our_loss, impl="triton")}
    return {
        FLOOR: matrix_products,
        f"{OURS} torch": functools.partial(our_loss, impl="torch"),
        **(on_cuda if device == "cuda" else {}),
        "eager torch": eager_loss,
        "torch.compile": lambda case: compile_eager_loss()(case),
        "Liger fused linear GRPO": liger_loss,
        "TRL chunked log-probabilities": trl_loss,
        "cut-cross-entropy": cut_cross_entropy_loss,
    }


# ------------------------------------------------------------------------------------------------------ measurement
def measure_case(case: Case, rounds: int) -> list[Row]:
    """Every implementation on one case: a warm-up, which also checks its gradient and its memory, then the rounds."""
    losses = list_implementations(case.hidden.device.type)
    rows = [Row(name) for name in losses]
    expected = time_once(eager_loss, case)[2]
    for row, (name, loss) in zip(rows, losses.items(), strict=True):
        show_progress(f"{case.name}: warming up {name}")
        try:
            if name in LIBRARIES:
                importlib.import_module(LIBRARIES[name])  # not part of the memory that is measured
            with peak_memory(row, case.hidden.device):
                row.gradient_norm = time_once(loss, case)[2]
        except MISSING as error:
            if name.startswith(OURS):
                raise
            row.skipped = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
        else:
            if name != FLOOR and abs(row.gradient_norm - expected) > TOLERANCE[case.hidden.dtype] * expected:
                row.skipped = f"wrong gradient: its norm is {row.gradient_norm:.5g}, not {expected:.5g}"
    for number in range(rounds):
        show_progress(f"{case.name}: round {number + 1} of {rounds}")
        for row in rows:
            if not row.skipped:
                forward, both, _ = time_once(losses[row.name], case)
                row.forward_s.append(forward)
                row.both_s.append(both)
    show_progress("")
    return rows


def time_once(loss: Loss, case: Case) -> tuple[float, float, float]:
    """Seconds of the forward pass, of forward and backward, and the norm of the hidden states' gradient."""
    wait_for_device(case.hidden.device)
    began = time.perf_counter()
    value = loss(case)
    wait_for_device(case.hidden.device)
    forward = time.perf_counter() - began
    gradients = torch.autograd.grad(value, case.leaves) if value.requires_grad else [value]
    wait_for_device(case.hidden.device)
    both = time.perf_counter() - began
    return forward, both, float(gradients[0].float().norm())


def wait_for_device(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def peak_memory(row: Row, device: torch.device) -> Iterator[None]:
    """Set the largest amount of memory in use inside the block, beyond what was in use before.

    On a CPU it is the resident set, whose high-water mark Linux resets on request: compare large differences only.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield
        row.peak_bytes = torch.cuda.max_memory_allocated(device) - before
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
        yield
        row.peak_bytes = max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


# ----------------------------------------------------------------------------------------------------------- output
def format_table(case: Case, rows: list[Row]) -> str:
    """Milliseconds, ratio to the floor and to the best of ours, and memory."""
    medians = {row.name: statistics.median(row.both_s) for row in rows if row.both_s}
    best = min(seconds for name, seconds in medians.items() if name.startswith(OURS))
    lines = [
        f"\n{case.name}: N={len(case.hidden)} D={case.hidden.shape[1]} V={len(case.weight)} "
        f"{case.hidden.dtype} on {case.hidden.device}",
        f"{'':<32}{'forward':>9}{'backward':>9}{'both ms':>9}{'x floor':>9}{'x ours':>8}{'extra MiB':>11}",
    ]
    for row in rows:
        cells = f"  not run: {row.skipped}"
        if not row.skipped:
            forward, both = statistics.median(row.forward_s), medians[row.name]
            cells = f"{1e3 * forward:>9.1f}{1e3 * (both - forward):>9.1f}{1e3 * both:>9.1f}"
            cells += f"{both / medians[FLOOR]:>9.2f}{both / best:>8.2f}{row.peak_bytes / MIB:>11.0f}"
        lines.append(f"{row.name:<32}{cells}")
    return "\n".join(lines)


def show_progress(text: str) -> None:
    """Progress, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print tables and, on request, write JSON."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m magrpo_kernels.bench", description=__doc__)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=[str(dtype)[6:] for dtype in TOLERANCE], default=DTYPES[cuda])
    parser.add_argument("--tokens", type=int, default=16384 if cuda else 4096, help="N")
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 256, help="D")
    parser.add_argument("--vocabulary", type=int, default=151936 if cuda else 32768, help="V")
    parser.add_argument("--sequences", type=int, default=32, help="the tokens are of this many equal sequences")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    args = parser.parse_args(arguments)
    if args.tokens % args.sequences:
        parser.error(f"--tokens {args.tokens} must be a multiple of --sequences {args.sequences}")
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}")
    report: dict[str, Any] = {"torch": torch.__version__, "device": name, "arguments": vars(args) | {"json": None}}
    ours_s: dict[str, float] = {}
    for title, options in (
        ("trained head", {}),
        ("frozen head", {"frozen": True}),
        ("trained head, half the groups degenerate", {"degenerate": 0.5}),
    ):
        case = make_case(title, args, **options)
        rows = measure_case(case, args.rounds)
        print(format_table(case, rows), flush=True)
        report[title] = [asdict(row) for row in rows]
        ours_s[title] = min(statistics.median(row.both_s) for row in rows if row.both_s and row.name.startswith(OURS))
    ratio = ours_s["trained head, half the groups degenerate"] / ours_s["trained head"]
    print(f"\n{OURS}: half the groups degenerate takes {ratio:.2f} of the time of none")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
