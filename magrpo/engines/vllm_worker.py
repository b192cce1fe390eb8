"""Changes to the worker of vLLM 0.32 (its first model runner): log-probabilities, support, reloading of weights.

vLLM's ``processed_logprobs`` are at the sampling temperature, but after top-p and top-k. The changed sampler gives
every request the log-probabilities before truncation, and records those after it, with the remaining ids, for requests
that ask for their support: their ``extra_args`` have a name under :data:`SUPPORT`.

Two methods of vLLM's sampler are replaced, ``topk_topp_sampler.forward`` and ``gather_logprobs``: vLLM 0.32 has no
public hook between them. Its own way (``return_sampling_mask``) needs its second model runner and a top-k on every
request. Here each token carries a ticket through vLLM in place of its rank, which is never read: the number of its
record among those of its request, negative. vLLM thus brings each ticket to the right token, however it orders, splits
or preempts requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUPPORT = "magrpo_support"
"""Key of vLLM's ``extra_args`` under which a request that asks for its support has a name of its own."""
Truncated = tuple[float, bytes]
"""A sampled token's log-probability over its support, and the ids of the support, ascending, as int32."""


class WorkerExtension:
    """Methods that vLLM mixes into its worker class; ``collective_rpc`` calls the public ones."""

    model_runner: Any
    reload_weights: Any

    def watch_truncation(self) -> None:
        """Change the sampler, so that it records the support of sampled tokens. May be called twice."""
        sampler = self.model_runner.sampler
        if isinstance(sampler.gather_logprobs, partial):
            return
        self._truncated: dict[str, list[Truncated]] = {}
        """Records of sampled tokens, by the name of the request. A ticket says the position of a record in its list."""
        self._truncated_logps: Tensor | None = None  # (n, V) of the step under way, -inf where truncation cut off
        truncating = sampler.topk_topp_sampler
        truncating.forward = partial(self._truncate, truncating.forward)
        sampler.gather_logprobs = partial(self._gather_logprobs, sampler.gather_logprobs)

    def take_truncated(self, name: str, tickets: Sequence[int]) -> list[Truncated | None]:
        """The records of tokens with these tickets, None where nothing was cut off; all of the request are dropped.

        Empty from a worker that does not sample, as some of tensor parallelism do not.
        """
        records = self._truncated.pop(name, [])
        if min(tickets, default=0) < -len(records):
            return []
        return [records[-ticket - 1] if ticket < 0 else None for ticket in tickets]

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
        tokens, self._truncated_logps = sample(logits, generators, k, p)
        return tokens, full

    def _gather_logprobs(
        self, gather: Callable[..., Any], logprobs: Tensor, num_logprobs: int, token_ids: Tensor
    ) -> Any:
        """vLLM calls this after each step with the tokens (n,) it sampled."""
        gathered = gather(logprobs, num_logprobs, token_ids)
        logps, self._truncated_logps = self._truncated_logps, None
        if logps is None:
            return gathered
        rows, names = self._find_recorded()
        if not rows:
            return gathered
        if len(rows) < len(logps):  # without a copy where every request asks for its support
            logps, token_ids = logps[rows], token_ids[rows]
        # One pass and one copy to the host: each copy waits for the device.
        kept = (logps > -torch.inf).nonzero().to(torch.int32).cpu().numpy()  # of each kept token its row and its id
        sizes = np.bincount(kept[:, 0], minlength=len(rows))
        ids = np.split(kept[:, 1], sizes.cumsum()[:-1])
        sampled = logps.gather(-1, token_ids[:, None]).squeeze(-1).tolist()
        ranks = gathered.selected_token_ranks.clone()
        tickets = []
        for name, logp, row in zip(names, sampled, ids, strict=True):
            records = self._truncated.setdefault(name, [])
            records.append((logp, row.tobytes()))
            tickets.append(-len(records))  # a rank is positive
        ranks[rows] = torch.tensor(tickets, dtype=ranks.dtype, device=ranks.device)
        return gathered._replace(selected_token_ranks=ranks)

    def _find_recorded(self) -> tuple[list[int], list[str]]:
        """Rows of the step whose requests ask for their support, and the names of these requests."""
        runner, rows, names = self.model_runner, [], []
        for row, request in enumerate(runner.input_batch.req_ids):
            params = runner.requests[request].sampling_params
            if params is not None and params.extra_args and SUPPORT in params.extra_args:
                rows.append(row)
                names.append(params.extra_args[SUPPORT])
        return rows, names


def expand_support(
    logps: Sequence[float], truncated: Sequence[Truncated | None], vocab_size: int
) -> tuple[list[float], list[list[int]]]:
    """Log-probabilities of the tokens of a completion over their support, and the ids of each support.

    Args:
        logps: Log-probabilities before truncation.
        truncated: The record of each token; None: nothing was cut off, so that its support is the vocabulary.
        vocab_size: Number of ids of the vocabulary.
    """
    over_support, ids = [], []
    for logp, record in zip(logps, truncated, strict=True):
        over_support.append(logp if record is None else record[0])
        ids.append(list(range(vocab_size)) if record is None else np.frombuffer(record[1], np.int32).tolist())
    return over_support, ids
