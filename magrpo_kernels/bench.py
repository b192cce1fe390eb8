"""Benchmark of the loss from hidden states against its floor, eager torch and other libraries, all in one run.

Every implementation computes the same gradient, that of ``-sum(advantage * logp)`` of sampled tokens with respect to
the hidden states and, unless frozen, the head; an implementation with another gradient is not timed. Each round runs
all of them, so that a slow moment of the machine affects all; medians are reported. The floor is the bare matrix
products, in the same chunks: nothing is added up; a row of its own says what the sum over chunks costs. The loss from
logits is compared with copies of the logits. CoMLRL's loss cannot be called apart from its trainer: its row is a loop
over tokens as CoMLRL 1.4.3 has one.
"""

import argparse
import contextlib
import functools
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from magrpo_kernels import (
    Groups,
    LossOptions,
    TokenInputs,
    group_policy_loss,
    policy_loss_from_logits,
)
from magrpo_kernels.hidden import add_product_, allocate_logits, slice_chunks
from magrpo_kernels.inputs import Impl

MIB = 1 << 20
DTYPES = {True: "bfloat16", False: "float32"}
FLOOR = "bare matrix products (floor)"
SUMMED = "the products, summed over chunks"
COPY = "one and a half copies (floor)"
TITLES = ("trained head", "frozen head", "logits in")
AIMS = {"trained head": 1.25, "frozen head": 1.2, "logits in": 1 / 0.85}
"""Targets: at most this many times the floor."""
CPU_AIMS = AIMS | {"trained head": 1.1, "frozen head": 1.1}
COMPILED = "torch.compile"
LOOP = "CoMLRL's loop over tokens"
LOOP_AIM = 100
"""Target: this many times as fast as the loop over tokens."""
SLOW_S = 5.0
"""Seconds; a slower implementation is timed only once."""
OURS = "magrpo_kernels"
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative tolerance of the norm of a gradient, by dtype."""
LIBRARIES = {
    "Liger fused linear GRPO": "liger_kernel.chunked_loss",
    "TRL chunked log-probabilities": "trl.kernels",
    "cut-cross-entropy": "cut_cross_entropy",
}
"""The modules that implement the loss in other libraries."""
MISSING = (ImportError, AttributeError, RuntimeError, ValueError, TypeError, AssertionError)
"""Errors of a library that is not installed or does not support this device."""


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """The tensors of one measurement: S sequences of equal length in groups of equal size, N tokens in all."""

    name: str
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    token_ids: Tensor  # (N,)
    groups: Groups
    token_advantages: Tensor  # (N,): the advantage of each token's sequence
    logits: Tensor | None = None  # (N, V): differentiated in place of hidden states and head

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that need gradients."""
        if self.logits is not None:
            return [self.logits]
        return [tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad]

    @property
    def advantages(self) -> Tensor:
        """The advantage of each sequence, (S,), float32."""
        return self.token_advantages[:: len(self.token_advantages) // len(self.groups.returns)]


Loss = Callable[[BenchmarkCase], Tensor]


@dataclass(slots=True)
class BenchmarkRow:
    """The seconds and extra bytes that one implementation took, or why it was skipped."""

    name: str
    forward_s: list[float] = field(default_factory=list)
    both_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    gradient_norm: float = 0.0
    skipped: str = ""


def make_case(name: str, args: argparse.Namespace, *, frozen: bool = False) -> BenchmarkCase:
    """Make random inputs."""
    place = {"device": torch.device(args.device), "dtype": getattr(torch, args.dtype)}
    generator = torch.Generator().manual_seed(0)
    size = 2 if args.sequences % 8 else 4
    returns = torch.randn(args.sequences, generator=generator, dtype=torch.float64)
    ids = torch.randint(args.vocabulary, (args.tokens,), generator=generator)
    weight = torch.randn(args.vocabulary, args.hidden, generator=generator) * args.hidden**-0.5
    hidden = torch.randn(args.tokens, args.hidden, generator=generator)
    sequences = torch.arange(args.sequences, device=args.device)
    starts = sequences // size * size
    groups = Groups(
        sequences=sequences.repeat_interleave(args.tokens // args.sequences),
        returns=returns.to(args.device),
        starts=starts,
        ends=(starts + size).clamp(max=args.sequences),
    )
    token_advantages = groups.form_advantages().float()[groups.sequences]
    hidden, weight = hidden.to(**place).requires_grad_(), weight.to(**place).requires_grad_(not frozen)
    return BenchmarkCase(name, hidden, weight, ids.to(args.device), groups, token_advantages)


# ------------------------------------------------------------------------------------------------- implementations
def our_loss(case: BenchmarkCase, impl: Impl) -> Tensor:
    """The loss of this package."""
    options = LossOptions(impl=impl, backward_once=True)
    inputs = TokenInputs(case.token_ids, torch.ones_like(case.token_advantages), groups=case.groups)
    if case.logits is not None:
        return policy_loss_from_logits(case.logits, inputs, options).loss
    return group_policy_loss(case.hidden, case.weight, inputs, options).loss


def eager_loss(case: BenchmarkCase) -> Tensor:
    """The loss by eager torch: all logits, log_softmax, gather and autograd."""
    logits = case.hidden @ case.weight.t() if case.logits is None else case.logits
    logps = logits.float().log_softmax(-1).gather(1, case.token_ids[:, None]).squeeze(1)
    return -(case.token_advantages * logps).sum()


@functools.cache
def compile_eager_loss() -> Loss:
    """The eager loss under torch.compile."""
    return torch.compile(eager_loss, dynamic=False)


def loop_loss(case: BenchmarkCase) -> Tensor:
    """The loss as in CoMLRL's trainer: a log_softmax for each token of each sequence."""
    assert case.logits is not None
    total, length = torch.zeros((), device=case.hidden.device), len(case.hidden) // len(case.advantages)
    ids = case.token_ids.view(-1, length)
    for number, advantage in enumerate(case.advantages):
        logits = case.logits[number * length : (number + 1) * length]
        logps = [torch.log_softmax(logits[i], dim=-1)[token] for i, token in enumerate(ids[number])]
        total = total - torch.stack(logps).sum() * advantage
    return total


def liger_loss(case: BenchmarkCase) -> Any:
    """Liger's fused linear GRPO loss, one sequence at a time. On-policy, its ratio is 1 and its gradient the same."""
    options = {"beta": 0.0, "compiled": False, "use_ref_model": False, "chunk_size": 1, "loss_type": "grpo"}
    grpo = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(temperature=1.0, **options)
    count = len(case.advantages)
    hidden, ids = case.hidden.view(count, -1, case.hidden.shape[1]), case.token_ids.view(count, -1)
    mean = grpo(hidden, case.weight, ids, torch.ones_like(ids), case.advantages)[0]
    return mean * len(case.hidden)  # from its mean over sequences of means over tokens


def trl_loss(case: BenchmarkCase) -> Any:
    """TRL's chunked head, with the loss computed from its log-probabilities."""
    apply = importlib.import_module("trl.kernels").ChunkedLogProbFunction.apply
    logps = apply(case.hidden, case.weight, None, case.token_ids, 1.0, 32768, None, 1.0, ())[0]
    return -(case.token_advantages * logps.float()).sum()


def cut_cross_entropy_loss(case: BenchmarkCase) -> Any:
    """The weighted per-token losses of cut-cross-entropy, with its gradient filter off."""
    options = {"filter_eps": None} if case.hidden.is_cuda else {"impl": "torch_compile"}
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    losses = function(case.hidden, case.weight, case.token_ids, reduction="none", **options)
    return (case.token_advantages * losses.float()).sum()


def torch_loss(case: BenchmarkCase) -> Any:
    """The weighted per-token losses of torch's own linear_cross_entropy, in chunks."""
    options = importlib.import_module("torch.nn").LinearCrossEntropyOptions()
    function = torch.nn.functional.linear_cross_entropy
    losses = function(case.hidden, case.weight, case.token_ids, reduction="none", options=options)
    return (case.token_advantages * losses.float()).sum()


def matrix_products(case: BenchmarkCase, *, summed: bool = False) -> Tensor:
    """Compute only the matrix products that every implementation needs, and discard the results.

    With ``summed``, the gradient of the head is added up over the chunks, as this package does.
    """
    hidden, weight = case.hidden.detach(), case.weight.detach()
    to_rows = torch.empty_like(hidden)
    trains = case.weight.requires_grad
    to_weight = None
    if trains:
        to_weight = torch.zeros_like(weight, dtype=torch.float32 if summed else None)
    parts = slice_chunks(len(hidden), len(weight), weight.device, trains_head=trains)
    buffer = allocate_logits(hidden, weight, parts)
    for part in parts:
        logits = torch.mm(hidden[part], weight.t(), out=buffer[: part.stop - part.start])
        torch.mm(logits, weight, out=to_rows[part])
        if to_weight is not None and summed:
            add_product_(to_weight, logits.t(), hidden[part])
        elif to_weight is not None:
            torch.mm(logits.t(), hidden[part], out=to_weight)
    return to_rows[0, 0]


def copy_logits(case: BenchmarkCase) -> Tensor:
    """Read the logits twice and write them once, up to a half: copy all of them, then half of them."""
    assert case.logits is not None
    source = case.logits.detach()
    target = torch.empty_like(source)
    target.copy_(source)
    half = len(source) // 2
    target[:half].copy_(source[half : 2 * half])
    return target[0, 0]


def list_implementations(case: BenchmarkCase) -> dict[str, Loss]:
    """The implementations compared on this case, by name; the first is the floor."""
    ours: dict[str, Loss] = {f"{OURS} torch": functools.partial(our_loss, impl="torch")}
    if case.hidden.is_cuda:
        ours[f"{OURS} triton"] = functools.partial(our_loss, impl="triton")
    plain: dict[str, Loss] = {
        "eager torch": eager_loss,
        COMPILED: lambda case: compile_eager_loss()(case),
    }
    if case.logits is not None:
        return {COPY: copy_logits, **ours, **plain, LOOP: loop_loss}
    trains = case.weight.requires_grad
    return {
        FLOOR: matrix_products,
        **({SUMMED: functools.partial(matrix_products, summed=True)} if trains else {}),
        **ours,
        **plain,
        "torch linear_cross_entropy": torch_loss,
        "Liger fused linear GRPO": liger_loss,
        "TRL chunked log-probabilities": trl_loss,
        "cut-cross-entropy": cut_cross_entropy_loss,
    }


# ------------------------------------------------------------------------------------------------------ measurement
def measure_case(case: BenchmarkCase, losses: Mapping[str, Loss], rounds: int) -> list[BenchmarkRow]:
    """Measure implementations on one case: a warm-up that checks gradient and memory, then the rounds."""
    rows = [BenchmarkRow(name) for name in losses]
    expected = measure_gradient(case)
    for row, (name, loss) in zip(rows, losses.items(), strict=True):
        show_progress(f"{case.name}: warming up {name}")
        try:
            if name in LIBRARIES:
                importlib.import_module(LIBRARIES[name])  # not part of the memory that is measured
            with peak_memory(row, case.hidden.device):
                forward, both, row.gradient_norm = time_once(loss, case)
            if both > SLOW_S and name != COMPILED:  # the first call of a compiled loss compiles it
                row.forward_s, row.both_s = [forward], [both]
        except MISSING as error:
            if name.startswith(OURS):
                raise
            row.skipped = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
        else:
            has_gradient = name not in (FLOOR, SUMMED, COPY)
            if has_gradient and abs(row.gradient_norm - expected) > TOLERANCE[case.hidden.dtype] * expected:
                row.skipped = f"wrong gradient: its norm is {row.gradient_norm:.5g}, not {expected:.5g}"
    for number in range(rounds):
        show_progress(f"{case.name}: round {number + 1} of {rounds}")
        for row in rows:
            if not row.skipped and max(row.both_s, default=0.0) <= SLOW_S:
                forward, both, _ = time_once(losses[row.name], case)
                row.forward_s.append(forward)
                row.both_s.append(both)
    show_progress("")
    return rows


def measure_gradient(case: BenchmarkCase) -> float:
    """The norm of the gradient of hidden states or logits, by eager torch, some tokens at a time."""
    squares = 0.0
    for start in range(0, len(case.hidden), 1024):
        part = slice(start, start + 1024)
        leaf = case.hidden if case.logits is None else case.logits
        rows = leaf.detach()[part].requires_grad_()
        chosen = replace(case, token_ids=case.token_ids[part], token_advantages=case.token_advantages[part])
        chosen = replace(chosen, hidden=rows) if case.logits is None else replace(chosen, logits=rows)
        (gradient,) = torch.autograd.grad(eager_loss(chosen), rows)
        squares += float(gradient.float().square().sum())
    return math.sqrt(squares)


def time_once(loss: Loss, case: BenchmarkCase) -> tuple[float, float, float]:
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
def peak_memory(row: BenchmarkRow, device: torch.device) -> Iterator[None]:
    """Set ``row.peak_bytes`` to the most memory in use inside the block, beyond the memory in use before.

    On a CPU it is the resident set, whose high-water mark Linux resets on request: only large differences mean much.
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
def format_table(case: BenchmarkCase, rows: list[BenchmarkRow]) -> str:
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
            cells += f"{both / medians[rows[0].name]:>9.2f}{both / best:>8.2f}{row.peak_bytes / MIB:>11.0f}"
        lines.append(f"{row.name:<32}{cells}")
    return "\n".join(lines)


def show_progress(text: str) -> None:
    """Show progress, if on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of options, whose defaults depend on the machine."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m magrpo_kernels.bench", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=[str(dtype)[6:] for dtype in TOLERANCE], default=DTYPES[cuda])
    parser.add_argument("--tokens", type=_positive, default=16384 if cuda else 4096, help="N")
    parser.add_argument("--hidden", type=_positive, default=4096 if cuda else 256, help="D")
    parser.add_argument("--vocabulary", type=_positive, default=151936 if cuda else 32768, help="V")
    parser.add_argument("--sequences", type=_positive, default=32, help="the tokens are of this many equal sequences")
    parser.add_argument("--rounds", type=_positive, default=7)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes a minute")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def measure_variant(title: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one of :data:`TITLES` and print its table; returns rows, median seconds and bytes."""
    case = make_case(title, args, frozen=title in ("frozen head", "logits in"))
    if title == "logits in":
        case = replace(case, logits=(case.hidden @ case.weight.t()).detach().requires_grad_())
    losses = list_implementations(case)
    if args.no_compile:
        del losses[COMPILED]
    rows = measure_case(case, losses, args.rounds)
    print(format_table(case, rows), flush=True)
    medians = {row.name: statistics.median(row.both_s) for row in rows if row.both_s}
    ours = min((name for name in medians if name.startswith(OURS)), key=lambda name: medians[name])
    extra = next(row.peak_bytes for row in rows if row.name == ours)
    return {"rows": [asdict(row) for row in rows], "medians_s": medians, "ours": ours, "extra_bytes": extra}


def compare_with_aims(measured: dict[str, dict[str, Any]], device: str) -> dict[str, tuple[float, float]]:
    """The ratio of our time to the floor or to another row, and the target for that ratio, by title."""
    ours_s = {title: found["medians_s"][found["ours"]] for title, found in measured.items()}
    floor_s = {title: measured[title]["medians_s"][COPY if title == "logits in" else FLOOR] for title in TITLES}
    aims = CPU_AIMS if device == "cpu" else AIMS
    ratios = {title: (ours_s[title] / floor_s[title], aims[title]) for title in TITLES}
    loop_s = measured["logits in"]["medians_s"].get(LOOP)
    return ratios | ({LOOP: (ours_s["logits in"] / loop_s, 1 / LOOP_AIM)} if loop_s else {})


def main(arguments: list[str] | None = None) -> int:
    """Measure with the options of a command line."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.tokens % args.sequences:
        parser.error(f"--tokens {args.tokens} must be a multiple of --sequences {args.sequences}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder")
    measure_loss(args)
    return 0


def measure_loss(args: argparse.Namespace) -> None:
    """Measure, print tables and, on request, write JSON."""
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}")
    measured = {title: measure_variant(title, args) for title in TITLES}
    ratios = compare_with_aims(measured, args.device)
    print()
    for title, (ratio, aim) in ratios.items():
        subject, against = ("logits in", "the time of the loop") if title == LOOP else (title, "its floor")
        state = "met" if ratio <= aim else "MISSED"
        print(f"{subject} takes {ratio:.3g} of {against}; the target is at most {aim:.3g}: {state}")
    if args.json:
        about = {"torch": torch.__version__, "device": name, "arguments": vars(args) | {"json": None}}
        args.json.write_text(json.dumps(about | measured | {"ratios": ratios}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
