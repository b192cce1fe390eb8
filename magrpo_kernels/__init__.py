"""The policy-gradient loss of MAGRPO as fused operations. Depends on torch and triton only.

Each is a registered operation (``torch.ops.magrpo``), so autograd and ``torch.compile`` take it as a whole.

Every operation takes ``impl``: ``torch`` runs anywhere and is the oracle, ``triton`` needs CUDA tensors (or Triton's
interpreter), ``auto`` takes triton on CUDA tensors and torch elsewhere.
"""

from magrpo_kernels.advantages import group_advantages, token_coefficients
from magrpo_kernels.hidden import policy_loss_from_hidden, token_logps
from magrpo_kernels.row import PolicyLoss, Support, policy_loss_from_logits

__all__ = [
    "PolicyLoss",
    "Support",
    "group_advantages",
    "policy_loss_from_hidden",
    "policy_loss_from_logits",
    "token_coefficients",
    "token_logps",
]
