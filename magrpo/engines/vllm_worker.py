"""Changes to the worker of vLLM 0.32 (its first model runner): log-probabilities, support, reloading of weights.

vLLM's ``processed_logprobs`` are at the sampling temperature, but after top-p and top-k. The changed sampler gives
every request the log-probabilities before truncation, and records those after it, with the remaining ids, for requests
that ask for their support.

vLLM's own way (``return_sampling_mask``) needs its second model runner and a top-k on every request. Here each token
carries a ticket through vLLM in place of its rank, which is never read. vLLM thus brings each ticket to the right
request, however it orders, splits or preempts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np


class Truncated(NamedTuple):
    """A sampled token's log-probability over its support, and the ids of the support, ascending."""

    logp: float
    ids: np.ndarray[Any, np.dtype[np.int32]]


class WorkerExtension:
    """Methods that vLLM mixes into its worker class; ``collective_rpc`` calls the public ones."""

    model_runner: Any
    reload_weights: Any

    def watch_truncation(self) -> None:
        """Change the sampler, so that it can record the support of sampled tokens."""
        self._records_support = False
        self._truncated: dict[int, Truncated] = {}
        self._num_tickets = 0
        self._truncated_logps: Tensor | None = None  # (n, V) of the step under way, -inf where truncation cut off
        sampler = self.model_runner.sampler
        truncating = sampler.topk_topp_sampler
        truncating.forward = partial(self._truncate, truncating.forward)
        sampler.gather_logprobs = partial(self._gather_logprobs, sampler.gather_logprobs)

    def record_truncation(self, recording: bool) -> None:
        """Switch the recording of support on or off; drop records of earlier requests."""
        self._records_support = recording
        self._truncated.clear()

    def take_truncated(self, tickets: Sequence[int]) -> list[Truncated | None]:
        """The records of tokens with these tickets; None where nothing was cut off."""
        return [self._truncated.pop(ticket, None) for ticket in tickets]

    def reload_from(self, folder: str) -> None:
        """Reload all weights, and the packed copy of a tied head on CPU, which vLLM's own reload omits."""
        self.reload_weights(weights_path=folder)
        if self.model_runner.model_config.hf_text_config.tie_word_embeddings:
            head = self.model_runner.get_model().lm_head
            head.quant_method.process_weights_after_loading(head)

    def _truncate(
        self, sample: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, generators: Any, k: Any, p: Any
    ) -> tuple[Tensor, Tensor]:
        if k is None and p is None:
            return sample(logits, generators, k, p)
        full = logits.log_softmax(dim=-1)
        tokens, logps = sample(logits, generators, k, p)
        self._truncated_logps = logps if self._records_support else None
        return tokens, full

    def _gather_logprobs(
        self, gather: Callable[..., Any], logprobs: Tensor, num_logprobs: int, token_ids: Tensor
    ) -> Any:
        """vLLM calls this after each step with the tokens (n,) it sampled."""
        gathered = gather(logprobs, num_logprobs, token_ids)
        logps, self._truncated_logps = self._truncated_logps, None
        if logps is None:
            return gathered
        kept = logps > -torch.inf
        ids = torch.split(kept.nonzero()[:, 1].to(torch.int32).cpu(), kept.sum(-1).tolist())
        sampled = logps.gather(-1, token_ids[:, None]).squeeze(-1).tolist()
        tickets = []
        for logp, row in zip(sampled, ids, strict=True):
            self._num_tickets += 1
            tickets.append(-self._num_tickets)  # a rank is positive
            self._truncated[-self._num_tickets] = Truncated(logp, row.numpy().copy())
        ranks = gathered.selected_token_ranks
        return gathered._replace(selected_token_ranks=torch.tensor(tickets, dtype=ranks.dtype, device=ranks.device))
