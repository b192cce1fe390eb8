"""The measurements of ``magrpo bench``, one module for each command.

Begin with ``iteration``, which times sampling and update on this machine. ``sandbox`` times the sandbox, ``pool`` the
pool of vLLM servers, ``driver`` the process that drives a run, and ``scale`` the stages at a place. ``stand_ins`` are
servers that send answers made beforehand.
"""
