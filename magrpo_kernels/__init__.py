"""The policy-gradient loss of MAGRPO as fused functions; nothing here knows the rest of the project.

Begin with :func:`~magrpo_kernels.hidden.group_policy_loss`. ``inputs`` and ``groups`` hold the records that a loss
takes, ``row`` the equations and their torch implementation, ``row_triton`` the Triton kernel, ``bench`` the benchmark.

``impl`` chooses the implementation: ``torch`` runs anywhere and is the reference, ``triton`` needs CUDA tensors (or
Triton's interpreter), ``auto`` is triton on CUDA tensors and torch elsewhere.
"""

from magrpo_kernels.groups import Groups as Groups
from magrpo_kernels.hidden import group_policy_loss as group_policy_loss
from magrpo_kernels.inputs import LossOptions as LossOptions
from magrpo_kernels.inputs import Support as Support
from magrpo_kernels.inputs import TokenInputs as TokenInputs
from magrpo_kernels.row import PolicyLoss as PolicyLoss
from magrpo_kernels.row import policy_loss_from_logits as policy_loss_from_logits
