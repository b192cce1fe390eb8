"""The comparison with CoMLRL: what both sides are given, and that their gradients agree. Nothing here is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.benchmarks import workload
from tests.benchmarks.__main__ import PARITY
from tests.benchmarks.ours import Side
from tests.benchmarks.parity import largest_difference


def test_text_and_token_ids_say_the_same_and_no_completion_can_end_early(tmp_path: Path) -> None:
    workload.write_model(tmp_path, 100)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = workload.prompts(100, 1)[0]
    assert tuple(tokenizer(prompt).input_ids) == workload.token_ids(prompt)
    assert len(workload.token_ids(prompt)) == workload.PROMPT_TOKENS
    assert tokenizer.decode(workload.token_ids(prompt)) == prompt
    assert min(tokenizer.eos_token_id, tokenizer.pad_token_id) >= 100


def test_our_side_runs_an_iteration(tmp_path: Path) -> None:
    workload.write_model(tmp_path, 100)
    rollout, update = Side(tmp_path).iteration(workload.prompts(100, 1))
    assert rollout > 0
    assert update > 0


@pytest.mark.slow
def test_our_gradient_is_comlrls() -> None:
    assert max(largest_difference().values()) <= PARITY
