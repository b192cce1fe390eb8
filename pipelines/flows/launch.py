"""Executes a run in this process, as a Prefect flow or without Prefect, which is imported only for a flow."""

from magrpo.progress.activity import LOADING, begin_startup, end_startup, show_activity
from magrpo.progress.notify import Notices
from magrpo.run.lock import hold_run
from magrpo.run.steps import first_missing, steps
from magrpo.run.store import RunStore
from magrpo.training.execute import Result, execute
from pipelines.flows.local_server import LocalServer


def run_stages(store: RunStore, *, local: bool) -> Result:
    """Execute the run as a Prefect flow, or without Prefect if ``local``."""
    begin_startup()
    try:
        return _run_locally(store) if local else _run_flow(store)
    finally:
        end_startup()


def _run_locally(store: RunStore) -> Result:
    if _has_work(store):
        import magrpo.model.policy  # noqa: F401  torch and transformers, loaded before the first stage asks for them
    return execute(store.path.parent, store.run_id, lambda run_step: run_step, {}, observers=[Notices()])


def _run_flow(store: RunStore) -> Result:
    root, run_id = store.path.parent, store.run_id
    with LocalServer(root / "prefect") as server:
        with hold_run(store):  # so that the flow run of a living process is not marked as crashed
            if _has_work(store):
                import magrpo.model.policy  # noqa: F401  torch and transformers, loaded while the server starts
            from pipelines.flows.train import mark_killed, name_server, train  # prefect, loaded meanwhile

            with show_activity(LOADING["Prefect"]), name_server():
                server.wait_until_ready()
                mark_killed(run_id, {"root": str(root), "run_id": run_id})
        with name_server():
            return train(str(root), run_id)


def _has_work(store: RunStore) -> bool:
    """Whether any step of the run is not committed yet."""
    config = store.config()
    return first_missing(config, store) < len(steps(config))
