"""Updates in the run's own process, on a policy that an engine may share."""

from __future__ import annotations

from pathlib import Path

from magrpo.config.run import RunConfig
from magrpo.interfaces import Progress
from magrpo.model.policy import Policy
from magrpo.model.side_by_side import hold_cores
from magrpo.run.files import locate_weights, read_samples
from magrpo.updates.updater import Updater


class InlineUpdates:
    """An :class:`magrpo.interfaces.Updates` in this process. ``dump``: folder for batches with a non-finite loss."""

    def __init__(self, policy: Policy, config: RunConfig, dump: Path) -> None:
        self._policy = policy
        self._config = config
        self._updater = Updater.of(policy, config, dump)
        self._checkpoint: Path | None = None
        """The adopted checkpoint whose states the optimizers hold, and whose weights the policy holds unless an engine
        has loaded others (``sources``). None: the states are new, or of an update that is not adopted."""

    def begin(self, out: Path) -> None:
        with hold_cores(self._policy.device):
            self._updater.save(out)

    def update(self, samples: Path, checkpoint: Path, out: Path, progress: Progress | None = None) -> dict[str, float]:
        batch, comparisons = read_samples(samples, self._config)
        with hold_cores(self._policy.device):
            if self._checkpoint != checkpoint or self._policy.sources != self._weights(checkpoint):
                self._updater.load(checkpoint)
            self._checkpoint = None
            metrics = self._updater.update(batch, progress, comparisons)
            self._updater.save(out)
        return metrics

    def adopt(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._policy.sources = self._weights(checkpoint)

    def close(self) -> None:
        """No-op."""

    def _weights(self, checkpoint: Path) -> dict[str, Path]:
        return locate_weights(checkpoint, self._policy.agents)
