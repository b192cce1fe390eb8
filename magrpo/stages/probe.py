"""The probes of a checkpoint: a few log-probabilities of each agent, which a server must reproduce."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import msgspec
import torch

from magrpo.engines.probes import NUM_TOKENS, PROBES, Probe
from magrpo.files.writing import atomic_write
from magrpo.model.policy import Policy
from magrpo.types import Message, Observation

_QUESTION = "Write a function that adds two numbers, and call it."
_ANSWER = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))"
_PROMPT_TOKENS = 32
_DIGITS = 6
"""Decimals of a stored log-probability; more than any server reproduces."""


def compute_probes(policy: Policy) -> dict[str, Probe]:
    """Compute the probe of every agent with its current weights, by one short forward pass."""
    return {agent: _compute_probe(policy, agent) for agent in policy.lineup.agents}


def write_probes(folder: Path, probes: dict[str, Probe]) -> None:
    """Write the probes into ``folder``, which holds one folder of weights for each agent."""
    atomic_write(folder / PROBES, msgspec.json.format(msgspec.json.encode(probes), indent=1) + b"\n")


def _compute_probe(policy: Policy, agent: str) -> Probe:
    prompt_ids = list(policy.lineup.render(agent, Observation((Message("user", _QUESTION),)))[-_PROMPT_TOKENS:])
    answer_ids = policy.lineup.tokenizer(agent).encode(_ANSWER, add_special_tokens=False)
    token_ids = list(islice(cycle(answer_ids), NUM_TOKENS))
    with policy.active(agent) as model, torch.no_grad():
        input_ids = torch.tensor([prompt_ids + token_ids], device=policy.device)
        logits = policy.run(model, lambda model: model(input_ids=input_ids).logits)[0, len(prompt_ids) - 1 : -1].float()
    targets = torch.tensor(token_ids, device=policy.device)[:, None]
    logps = logits.log_softmax(-1).gather(-1, targets).squeeze(-1)
    return Probe(prompt_ids, token_ids, [round(logp, _DIGITS) for logp in logps.tolist()])
