"""What a run is configured with, read from TOML: one frozen tree of sections.

Begin with :mod:`magrpo.config.run`, the whole tree and what must fit together in it. :mod:`~magrpo.config.sections`
holds most of its sections, :mod:`~magrpo.config.agents` those that the model code needs. :mod:`~magrpo.config.validate`
applies overrides and explains mistakes. :mod:`~magrpo.config.place` says where a run executes, which never changes its
results.
"""
