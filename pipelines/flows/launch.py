"""Executing a run here, as a Prefect flow or without Prefect, which is imported only for a flow."""

from rich.console import Console

from magrpo.layout import hold_run
from magrpo.store import RunStore
from pipelines.flows.local_server import STARTING, LocalServer
from pipelines.progress.notify import Notices
from pipelines.training.execute import Result, execute


def run_stages(store: RunStore, console: Console, *, local: bool) -> Result:
    """Execute the run as a Prefect flow, or without Prefect if ``local``."""
    root, run_id = store.path.parent, store.run_id
    if local:
        return execute(root, run_id, lambda run_step: run_step, {}, observers=[Notices()])
    with LocalServer(root / "prefect") as server:
        with hold_run(store):  # so that the flow run of a living process is not marked as crashed
            if server.process is not None:
                console.print(STARTING)
            import magrpo.policy  # noqa: F401  torch and transformers, loaded while the server starts
            from pipelines.flows.train import mark_killed, train  # prefect, loaded while the server starts

            server.wait_until_ready()
            mark_killed(run_id)
        return train(str(root), run_id)
