"""Step 3: the Triton kernel against float64, bit for bit against itself, and under stress that would show a race.

On a GPU it runs compiled, elsewhere in Triton's interpreter (``TRITON_INTERPRET=1``), which shows no races. The oracle
is the torch implementation in float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from magrpo_kernels import LossOptions, Support, TokenInputs, group_policy_loss
from magrpo_kernels.row import row_loss
from pipelines.gpu_check.results import Result, judge
from pipelines.gpu_check.setting import Setting

LOGP_BOUND = 2e-6, 1e-6
"""Absolute and relative error of log-probabilities (docs/kernels.md)."""
GRADIENT_BOUND = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Of the largest element of a row, beside 1e-5 over the temperature."""
REMEDY = "train with algo.kernel=torch, and report it with gpu-report.json: docs/kernels.md defines the correct result"
FORMS = ("reinforce", "ratio", "kl", "ratio and kl", "support")
MODE = LossOptions(clip_low=0.2, clip_high=0.3, checked=True, impl="triton")


@dataclass(frozen=True, slots=True)
class Case:
    """Random logits and the form of the loss."""

    vocabulary: int
    form: str = "reinforce"
    mean: float = 0.0
    deviation: float = 3.0
    temperature: float = 1.0


def check_kernels(setting: Setting) -> Iterator[Result]:
    """Check the kernel on all shapes, forms and dtypes."""
    vocabularies = [1, 127, 1000, 9001] if setting.is_small else [1, 127, 1000, 9001, 50_257, 151_936]
    grid = [Case(size, form, temperature=0.8) for size, form in product(vocabularies, FORMS)]
    largest = vocabularies[-1]
    grid += [Case(largest, mean=1e4, deviation=30.0), Case(largest, mean=50.0, deviation=1.0, temperature=0.1)]
    grid += [Case(largest, deviation=10.0, temperature=0.8), Case(largest, mean=-1e4, deviation=30.0, temperature=0.1)]
    for dtype in GRADIENT_BOUND:
        errors = [measure_errors(setting, case, dtype) for case in grid]
        for name, worst in zip(("log-probabilities", "gradient"), map(max, zip(*errors, strict=True)), strict=True):
            found = f"{worst:.2g} of the bound, the worst of {len(grid)} cases"
            yield judge(f"{name}, {str(dtype)[6:]}", found, "at most 1", worst <= 1, REMEDY)
    yield _check_race(setting, largest)
    yield _check_repeats(setting)
    if not setting.is_small:
        yield _check_offsets(setting)


def measure_errors(setting: Setting, case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """The largest errors of log-probabilities and gradient as fractions of their bounds; infinite if not finite.

    The gradient is written over NaN.
    """
    logits, inputs = draw_inputs(setting, case, dtype)
    options = replace(MODE, temperature=case.temperature)
    gradient = torch.full_like(logits, torch.nan)
    _, logps = row_loss(logits.clone(), inputs, options, gradient)
    exact = torch.empty_like(logits, dtype=torch.float64)
    _, wanted = row_loss(logits.double(), inputs, replace(options, impl="torch"), exact)
    absolute, relative = LOGP_BOUND
    of_logps = ((logps.double() - wanted).abs() / (absolute + relative * wanted.abs())).max()
    bound = GRADIENT_BOUND[dtype] * exact.abs().amax(1, keepdim=True) + 1e-5 / case.temperature
    of_gradient = ((gradient.double() - exact).abs() / bound).max()
    return _count_error(of_logps), _count_error(of_gradient)


def _count_error(error: Tensor) -> float:
    return float(torch.where(error.isfinite(), error, torch.inf))


def draw_inputs(setting: Setting, case: Case, dtype: torch.dtype, count: int = 64) -> tuple[Tensor, TokenInputs]:
    """Random logits and inputs of ``count`` tokens, or of 2. Old and reference policies are near the current one."""
    count = 2 if setting.is_small else count
    generator = torch.Generator().manual_seed(case.vocabulary)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(setting.device)

    logits = (case.mean + case.deviation * draw(count, case.vocabulary)).to(dtype)
    ids = torch.randint(case.vocabulary, (count,), generator=generator).to(setting.device)
    inputs = TokenInputs(ids, draw(count))
    logps = (logits.double() / case.temperature).log_softmax(1).gather(1, ids[:, None]).squeeze(1).float()
    if "ratio" in case.form:
        inputs = replace(inputs, old_logps=logps + 0.3 * draw(count))
    if "kl" in case.form:
        inputs = replace(inputs, ref_logps=logps + 0.3 * draw(count), kl_coefficients=draw(count).abs())
    if case.form == "support":
        kept = (draw(count, case.vocabulary) > 0).scatter(1, ids[:, None], value=True)
        bounds = torch.cat([ids.new_zeros(1), kept.sum(1).cumsum(0)])
        inputs = replace(inputs, support=Support(kept.nonzero()[:, 1], bounds))
    return logits, inputs


def _check_race(setting: Setting, vocabulary: int) -> Result:
    """In place against out of place, beside copies that delay some warps."""
    repeats = 2 if setting.is_small else 200
    logits, inputs = draw_inputs(setting, Case(vocabulary, "ratio"), torch.bfloat16, count=1024)
    # Low ids are written last, high ids first.
    ids = torch.arange(len(logits), device=setting.device) * 63 % min(4096, vocabulary)
    ids = torch.where(ids % 2 == 0, ids, vocabulary - 1 - ids)
    inputs = replace(inputs, token_ids=ids)
    wanted = torch.empty_like(logits)
    expected = row_loss(logits, inputs, MODE, wanted)
    other = None if setting.is_small else torch.cuda.Stream(setting.device)  # type: ignore[no-untyped-call]
    ballast = torch.empty(1 << (10 if setting.is_small else 28), dtype=torch.uint8, device=setting.device)
    differing = 0
    for _ in range(repeats):
        rows = logits.clone()
        setting.wait_for_device()
        if other is not None:
            with torch.cuda.stream(other):
                ballast.copy_(ballast.flip(0))
        found = row_loss(rows, inputs, MODE, rows)
        setting.wait_for_device()
        same = torch.equal(rows, wanted) and all(map(torch.equal, found, expected))
        differing += not same
    name = "in place against out of place, beside copies"
    return judge(name, f"{differing} of {repeats} differ", "none", differing == 0, REMEDY)


def _check_repeats(setting: Setting) -> Result:
    """The whole loss from hidden states, ten times."""
    tokens, width, vocabulary = (8, 16, 300) if setting.is_small else (4096, 1024, 50_257)
    generator = torch.Generator().manual_seed(1)
    hidden, head = (
        torch.randn(shape, generator=generator).to(setting.device, setting.dtype).requires_grad_()
        for shape in ((tokens, width), (vocabulary, width))
    )
    ids = torch.randint(vocabulary, (tokens,), generator=generator).to(setting.device)
    inputs = TokenInputs(ids, torch.randn(tokens, generator=generator).to(setting.device))
    outcomes = []
    for _ in range(2 if setting.is_small else 10):
        loss, logps = group_policy_loss(hidden, head, inputs, LossOptions(impl="triton"))
        outcomes.append((loss.detach(), logps, *torch.autograd.grad(loss, [hidden, head])))
    differing = sum(not all(map(torch.equal, outcome, outcomes[0])) for outcome in outcomes)
    finite = all(bool(values.isfinite().all()) for values in outcomes[0])
    found = f"{differing} of {len(outcomes)} differ{'' if finite else ', not finite'}"
    return judge("the loss and its gradients, again", found, "none", differing == 0 and finite, REMEDY)


def _check_offsets(setting: Setting) -> Result:
    """Rows past 2^31 elements."""
    vocabulary = 151_936
    count = 2**31 // vocabulary + 8
    logits = torch.zeros(count, vocabulary, dtype=torch.bfloat16, device=setting.device)
    ids = torch.full((count,), 3, device=setting.device)
    inputs = TokenInputs(ids, torch.ones(count, device=setting.device))
    _, logps = row_loss(logits, inputs, MODE, logits)
    wanted = -torch.tensor(float(vocabulary)).log()
    good = bool((logps - wanted.to(logps)).abs().max() < 1e-4) and bool((logits[-1, 3] < -0.9) & (logits[-1, 4] > 0))
    found = "as in the first row" if good else "wrong"
    return judge("the last of 2^31 logits", found, "as in the first row", good, REMEDY)
