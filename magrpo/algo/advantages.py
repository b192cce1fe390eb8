"""Group-relative advantages: the definition over the kernel, and the returns that the loss forms them from again."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

import magrpo_kernels
from magrpo.types import Estimator, Normalize, Sample
from magrpo_kernels import Groups
from magrpo_kernels.advantages import ESTIMATORS, advantages_by_group


def group_advantages(
    returns: Sequence[Sequence[float]], estimator: Estimator, normalize: Normalize = "none"
) -> list[list[float]]:
    """The advantage of every completion over its siblings: one inner list for each node and agent, ``G`` long or less.

    ``magrpo``: MAGRPO, arXiv 2508.04652, section 4; ``marloo``: leave-one-out, RLOO, arXiv 2402.14740; ``maremax``: the
    best sibling as baseline, after ReMax, arXiv 2310.10505; ``mareinforce``: REINFORCE, the returns themselves. The
    formulas are those of :func:`magrpo_kernels.group_advantages`, computed in float64.
    """
    sizes = torch.tensor([0, *(len(group) for group in returns)])
    flat = torch.tensor([value for group in returns for value in group], dtype=torch.float64)
    advantages = magrpo_kernels.group_advantages(flat, sizes.cumsum(0), estimator, normalize)
    return [part.tolist() for part in torch.split(advantages, sizes[1:].tolist())]


def tabulate_returns(
    samples: Mapping[str, Sequence[Sample]], estimators: Mapping[str, Estimator], normalize: Normalize
) -> Groups:
    """The returns of all samples, group by group; ``sequences`` has one entry for each sample, agent after agent.

    ``estimators``: of each agent. The stored advantages are the record: where the returns at hand do not give them back
    to the last bit of float32, as in a group of which a part is missing, the group holds the stored ones.
    """
    members: dict[tuple[str, int], list[int]] = {}
    in_order = [(agent, sample) for agent, agent_samples in samples.items() for sample in agent_samples]
    for index, (agent, sample) in enumerate(in_order):
        members.setdefault((agent, sample.group), []).append(index)
    order = list(chain.from_iterable(members.values()))
    bounds = torch.tensor([0, *map(len, members.values())]).cumsum(0)
    returns = torch.tensor([in_order[index][1].returns for index in order], dtype=torch.float64)
    stored = torch.tensor([in_order[index][1].advantage for index in order], dtype=torch.float64)
    codes = torch.tensor([ESTIMATORS.index(estimators[agent]) for agent, _ in members], dtype=torch.long)
    formed = advantages_by_group(returns, bounds, codes, normalize)
    group = torch.arange(len(members)).repeat_interleave(bounds.diff())
    differs = torch.zeros(len(members), dtype=torch.bool)
    differs[group[formed.float() != stored.float()]] = True
    codes[differs] = ESTIMATORS.index("given")
    sequences = torch.empty(len(order), dtype=torch.long)
    sequences[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
    return Groups(sequences, torch.where(differs[group], stored, returns), bounds, codes)
