"""The half of the sandbox that runs inside the jail. It imports only the standard library and its own modules.

Begin with ``zygote.py``, which forks the two processes of each program. The tester (``tester.py``) runs the test and
calls the program through ``proxy.py``. The candidate (``candidate.py``) runs the program and answers. Between them,
``wire.py`` carries frames, which hold the plain data of ``values.py``. ``confine.py`` and ``seccomp.py`` isolate each.
"""
