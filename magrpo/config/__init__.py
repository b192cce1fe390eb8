"""What a run is configured with, read from TOML: one frozen tree of sections.

Begin with :mod:`magrpo.config.run`, the whole tree. :mod:`~magrpo.config.agents` holds the sections that the model code
needs; :mod:`~magrpo.config.place` says where a run executes, which never changes its results;
:mod:`~magrpo.config.validate` applies overrides and explains mistakes.
"""
