"""The gateway: lets a program of the user's ask the agents as it would ask any chat model, and records every call.

:mod:`~magrpo.gateway.player` plays a batch of episodes: it starts the programs (:mod:`~magrpo.gateway.launcher` here,
:mod:`~magrpo.gateway.forkserver` in a process of its own), answers their requests (:mod:`~magrpo.gateway.server`) with
completions that the engine samples in batches, and seals each :mod:`~magrpo.gateway.sessions` into an
:class:`~magrpo.types.Episode`. Programs import :mod:`~magrpo.gateway.agents` only, so that module loads no library.
"""
