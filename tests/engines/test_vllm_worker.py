"""The records of truncation reach their requests, whatever rows these have in each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from magrpo.engines.vllm_worker import SUPPORT, WorkerExtension, expand_support

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0]])


class Gathered(NamedTuple):
    """As vLLM's sampler returns it."""

    logprobs: Tensor
    selected_token_ranks: Tensor


def keep_two(logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Tensor]:
    """The likeliest token, and log-probabilities over the two likeliest."""
    if k is None:
        return logits.argmax(-1), logits.log_softmax(-1)
    kept = torch.full_like(logits, -torch.inf)
    top = logits.topk(2)
    return logits.argmax(-1), kept.scatter(-1, top.indices, top.values).log_softmax(-1)


def gather(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Gathered:
    return Gathered(logprobs.gather(-1, token_ids[:, None]), torch.ones(len(token_ids), dtype=torch.int64))


class Worker(WorkerExtension):
    """A worker whose model gives :data:`LOGITS`; ``b`` does not ask for its support."""

    def __init__(self) -> None:
        sampler = SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=keep_two), gather_logprobs=gather)
        requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None if name == "b" else {SUPPORT: name}))
            for name in "abc"
        }
        self.model_runner: Any = SimpleNamespace(
            sampler=sampler, requests=requests, input_batch=SimpleNamespace(req_ids=[])
        )
        self.watch_truncation()
        self.watch_truncation()

    def step(self, rows: str, k: int | None = 2) -> dict[str, int]:
        """One step of requests in these rows; returns their tickets."""
        self.model_runner.input_batch.req_ids = list(rows)
        logits = LOGITS[[ord(name) - ord("a") for name in rows]]
        tokens, logps = self.model_runner.sampler.topk_topp_sampler.forward(logits, {}, k, None)
        gathered = self.model_runner.sampler.gather_logprobs(logps, 0, tokens)
        torch.testing.assert_close(
            gathered.logprobs.squeeze(-1), logits.log_softmax(-1).amax(-1), msg="before truncation"
        )
        return dict(zip(rows, gathered.selected_token_ranks.tolist(), strict=True))


def test_tickets_bring_records_to_their_tokens() -> None:
    worker = Worker()
    steps = [worker.step("abc"), worker.step("cb"), worker.step("c", k=None), worker.step("bac")]
    assert [step["b"] for step in steps if "b" in step] == [1, 1, 1], "its rank"
    truncated = worker.take_truncated("a", [steps[0]["a"], steps[3]["a"]])
    expected = float(torch.tensor([2.0, 3.0]).log_softmax(-1)[1])
    for record in truncated:
        assert record is not None
        assert record[0] == pytest.approx(expected)
    assert expand_support([-9.0, -9.0], truncated, 4)[1] == [[1, 3], [1, 3]]
    discarded = steps[1]["c"]  # vLLM drops a token of a request that it preempts
    kept = worker.take_truncated("c", [steps[0]["c"], steps[2]["c"], steps[3]["c"]])
    assert discarded not in (steps[0]["c"], steps[3]["c"])
    logps, support = expand_support([-9.0, -1.5, -9.0], kept, 4)
    assert support == [[2, 3], [0, 1, 2, 3], [2, 3]]
    assert logps[1] == -1.5, "nothing was cut off"
    assert worker.take_truncated("a", [-1]) == [], "taken before"
