"""The policy-gradient loss of MAGRPO as fused operations. Depends on torch and triton only.

Each is a registered operation (``torch.ops.magrpo``), so autograd and ``torch.compile`` treat it as a unit.

``impl`` chooses the implementation: ``torch`` runs anywhere and is the reference, ``triton`` needs CUDA tensors (or
Triton's interpreter), ``auto`` is triton on CUDA tensors and torch elsewhere.
"""

from magrpo_kernels.advantages import group_advantages as group_advantages
from magrpo_kernels.hidden import group_policy_loss as group_policy_loss
from magrpo_kernels.inputs import Groups as Groups
from magrpo_kernels.inputs import LossOptions as LossOptions
from magrpo_kernels.inputs import Support as Support
from magrpo_kernels.inputs import TokenInputs as TokenInputs
from magrpo_kernels.row import PolicyLoss as PolicyLoss
from magrpo_kernels.row import policy_loss_from_logits as policy_loss_from_logits
