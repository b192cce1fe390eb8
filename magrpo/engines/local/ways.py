"""The ways to decode a batch, and the choice of the fastest one that is right for a model.

Families differ in their memory: keys and values, states of linear attention, or caches of their own. No list of
families is kept, but for those that have a step of their own: each way is tried on a few tokens and compared with plain
forward passes.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from magrpo.engines import Completion
from magrpo.engines.local.decoding import Start, decode_batch, start_padded
from magrpo.engines.local.llama_steps import KNOWN_MODELS
from magrpo.engines.local.plain_steps import start_cached, start_whole
from magrpo.errors import ConfigError, quote_error
from magrpo.types import Request, SamplingParams


class Way(NamedTuple):
    """A way to decode a batch."""

    start: Start
    pads: bool
    """Whether prompts of several lengths may be in one batch."""
    notice: str
    """Text that tells the user about a drawback of this way; empty if there is none."""


PADDED = Way(start_padded, True, "")
CACHED = Way(
    start_cached,
    False,
    "keeps more than keys and values in its cache, so the engine decodes only prompts of one length together, with the "
    "cache of transformers",
)
WHOLE = Way(
    start_whole,
    False,
    "has a cache of its own that the engine does not know, so every token computes its whole text again: slow",
)

_MISFITS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)
"""Errors of models that are given a cache which they do not know."""
_NO_STOP = -1
_PROBES = tuple(
    Request("", prompt_ids, SamplingParams(max_new_tokens=length), seed)
    for seed, (prompt_ids, length) in enumerate([((1, 3), 3), ((1, 3), 1), ((2, 1, 3, 2), 3)])
)
"""Two siblings, one of which ends first, and a longer prompt."""


def choose_way(model: PreTrainedModel, dtype: torch.dtype) -> Way:
    """Choose the first way that gives the log-probabilities of plain forward passes. ``dtype``: of matrix products.

    Raises ConfigError if there is none, as for models whose tokens attend to later ones.
    """
    if type(model) in KNOWN_MODELS:
        return PADDED  # without the seconds that passes of a large model take
    tolerance = 1e-3 if dtype == torch.float32 else 1.0  # rounding moves logits of large models by some tenths
    for way in (PADDED, CACHED, WHOLE):
        try:
            if _is_right(model, way, tolerance):
                return way
        except torch.OutOfMemoryError:
            raise
        except _MISFITS as error:
            if way is not WHOLE:
                continue
            precision = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{model.name_or_path!r}: the forward pass of {type(model).__name__} in {precision} fails here: "
                f'{quote_error(error)}; try model.dtype = "float32" or a family that docs/engines.md lists'
            ) from error
    raise ConfigError(
        f"{model.name_or_path!r}: {type(model).__name__} is not a causal language model: the probability of a token "
        "depends on later tokens, so it can be neither sampled nor trained; docs/engines.md lists families that work"
    )


def split_batches(
    requests: Sequence[tuple[int, Request]], way: Way, max_batch: int
) -> Iterator[Sequence[tuple[int, Request]]]:
    """Split numbered requests, sorted by the length of their prompts, into batches."""
    groups = [requests]
    if not way.pads:
        groups = [list(group) for _, group in groupby(requests, key=lambda entry: len(entry[1].prompt_ids))]
    for group in groups:
        for start in range(0, len(group), max_batch):
            yield group[start : start + max_batch]


@torch.no_grad()
def _is_right(model: PreTrainedModel, way: Way, tolerance: float) -> bool:
    for batch in split_batches([*enumerate(_PROBES)], way, len(_PROBES)):
        requests = [request for _, request in batch]
        completions = decode_batch(model, requests, [_NO_STOP], None, start=way.start)
        for request, completion in zip(requests, completions, strict=True):
            sampled = torch.tensor(completion.logps, device=model.device)
            expected = _compute_logps(model, request, completion)
            # Weights that have diverged give nan in any way; the engine reports them.
            if not torch.allclose(sampled, expected, rtol=0, atol=tolerance, equal_nan=True):
                return False
    return True


def _compute_logps(model: PreTrainedModel, request: Request, completion: Completion) -> Tensor:
    """The log-probabilities of a completion by one forward pass over its text, as an update computes them."""
    text = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device=model.device)
    logits = model(input_ids=text, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
    logps: Tensor = logits.log_softmax(-1).gather(-1, text[0, len(request.prompt_ids) :, None]).squeeze(-1)
    return logps
