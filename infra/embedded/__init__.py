"""Makes the two base models shipped in magrpo/assets, by supervised learning from random weights.

Begin with :mod:`infra.embedded.command`. :mod:`infra.embedded.warm_start` builds the tokenizer and trains the model on
examples from :mod:`infra.embedded.demonstrations`, written in the styles of :mod:`infra.embedded.conventions`. This
package is not part of the wheel: run it from the repository as ``python -m infra.embedded --output FOLDER``.
"""
