"""Changes to the sampler of vLLM 0.32 (its first model runner): log-probabilities, and the support after truncation.

vLLM's ``processed_logprobs`` are at the sampling temperature, but after top-p and top-k. The changed sampler gives
every request the log-probabilities before truncation, and records those after it, with the remaining ids, for requests
that ask for their support.

vLLM's own way (``return_sampling_mask``) needs its second model runner and a top-k on every request. Here each token
carries a ticket through vLLM in place of its rank, which is never read. vLLM thus brings each ticket to the right
request, however it orders, splits or preempts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from torch import Tensor


class Truncated(NamedTuple):
    """A sampled token's log-probability over its support, and the ids of the support, ascending."""

    logp: float
    ids: np.ndarray[Any, np.dtype[np.int32]]


class TruncationRecorder:
    """Records the support of sampled tokens of one sampler, until ``take_records``."""

    def __init__(self, sampler: Any) -> None:
        self._recording = False
        self._kept: dict[int, Truncated] = {}
        self._tickets = 0
        self._logps: Tensor | None = None  # (n, V) of the step under way, -inf where truncation cut off
        truncating = sampler.topk_topp_sampler
        truncating.forward = partial(self._truncate, truncating.forward)
        sampler.gather_logprobs = partial(self._gather, sampler.gather_logprobs)

    def set_recording(self, recording: bool) -> None:
        """Switch recording on or off; drop records of earlier requests."""
        self._recording = recording
        self._kept.clear()

    def take_records(self, tickets: Sequence[int]) -> list[Truncated | None]:
        """The records of tokens with these tickets; None where nothing was cut off."""
        return [self._kept.pop(ticket, None) for ticket in tickets]

    def _truncate(
        self, sample: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, generators: Any, k: Any, p: Any
    ) -> tuple[Tensor, Tensor]:
        if k is None and p is None:
            return sample(logits, generators, k, p)
        full = logits.log_softmax(dim=-1)
        tokens, logps = sample(logits, generators, k, p)
        self._logps = logps if self._recording else None
        return tokens, full

    def _gather(self, gather: Callable[..., Any], logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """vLLM calls this after each step with the tokens (n,) it sampled."""
        gathered = gather(logprobs, num_logprobs, token_ids)
        logps, self._logps = self._logps, None
        if logps is None:
            return gathered
        kept = logps > -torch.inf
        counts = kept.sum(-1).tolist()
        ids = torch.split(kept.nonzero()[:, 1].to(torch.int32).cpu(), counts)
        sampled = logps.gather(-1, token_ids[:, None]).squeeze(-1).tolist()
        tickets = []
        for logp, row in zip(sampled, ids, strict=True):
            self._tickets += 1
            tickets.append(-self._tickets)  # a rank is positive
            self._kept[-self._tickets] = Truncated(logp, row.numpy().copy())
        ranks = gathered.selected_token_ranks
        return gathered._replace(selected_token_ranks=torch.tensor(tickets, dtype=ranks.dtype, device=ranks.device))
