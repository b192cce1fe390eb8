"""``infra/prefect.yaml`` as Prefect reads it, against the flow that it deploys."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.flows import load_flow_from_entrypoint
from prefect.server.schemas.schedules import CronSchedule
from pydantic import ValidationError

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text())


def test_prefect_reads_it() -> None:
    PrefectYamlModel.model_validate(FILE)
    with pytest.raises(ValidationError):  # it does refuse things
        PrefectYamlModel.model_validate({**FILE, "deployments": [{"name": 3, "entrypoint": 3}]})


@pytest.mark.parametrize("deployment", FILE["deployments"], ids=lambda deployment: deployment["name"])
def test_a_deployment_fits_its_flow(deployment: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    inspect.signature(flow.fn).bind(**deployment["parameters"])
    config = Path(deployment["parameters"]["config"])
    assert (ROOT / config.relative_to("/opt/magrpo")).is_file()
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    for schedule in deployment.get("schedules", []):
        CronSchedule(**schedule)
