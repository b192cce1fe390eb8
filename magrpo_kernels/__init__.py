"""The policy-gradient loss of MAGRPO as fused operations. Depends on torch and triton only.

Each is a registered operation (``torch.ops.magrpo``), so autograd and ``torch.compile`` treat it as a unit.

``impl`` chooses the implementation: ``torch`` runs anywhere and is the reference, ``triton`` needs CUDA tensors (or
Triton's interpreter), ``auto`` is triton on CUDA tensors and torch elsewhere.
"""

from magrpo_kernels.advantages import group_advantages
from magrpo_kernels.hidden import policy_loss_from_hidden, token_logps
from magrpo_kernels.inputs import LossOptions, Support, TokenInputs
from magrpo_kernels.row import PolicyLoss, policy_loss_from_logits

__all__ = [
    "LossOptions",
    "PolicyLoss",
    "Support",
    "TokenInputs",
    "group_advantages",
    "policy_loss_from_hidden",
    "policy_loss_from_logits",
    "token_logps",
]
