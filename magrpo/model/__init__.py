"""The agents' language models: loading bases, adapters, and one forward pass.

Begin with :mod:`magrpo.model.policy`, the trained weights of all agents. :mod:`~magrpo.model.lineup` loads tokenizers
and renders prompts; :mod:`~magrpo.model.collate` pads samples into tensors.
"""
