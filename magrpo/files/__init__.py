"""Files and folders that outlive kills and that several processes share.

Begin with :mod:`magrpo.files.writing`, which writes files whole. :mod:`~magrpo.files.locks` lets one process at a time
make something in a folder, :mod:`~magrpo.files.hub` asks the Hugging Face hub and its caches, and
:mod:`~magrpo.files.paths` reads paths as users write them.
"""
