"""The measurements of ``magrpo bench``, one module for each command.

Begin with ``iteration``, which times sampling and update on this machine; ``sandbox`` times the sandbox.
"""
