"""``infra/prefect.yaml`` and ``infra/automations.yaml`` as Prefect reads them, against the flows that they name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.events.schemas.automations import AutomationCore
from prefect.flows import load_flow_from_entrypoint
from prefect.server.events.schemas.automations import AutomationCreate
from prefect.server.schemas.schedules import CronSchedule
from pydantic import ValidationError

from magrpo.config.run import load_config
from magrpo.experiments.study import load_study
from pipelines.arguments import locate_config
from pipelines.flows.schedule import scheduled
from pipelines.flows.study import study
from pipelines.flows.train import train

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text())


def test_prefect_reads_it() -> None:
    PrefectYamlModel.model_validate(FILE)
    with pytest.raises(ValidationError):  # it does refuse things
        PrefectYamlModel.model_validate({**FILE, "deployments": [{"name": 3, "entrypoint": 3}]})


def test_prefect_reads_the_automations_and_they_watch_every_flow() -> None:
    """As its command reads the file, and then its server what the command sends."""
    text = (ROOT / "infra" / "automations.yaml").read_text()
    for automation in yaml.safe_load(text.replace("BLOCK_ID", str(UUID(int=0))))["automations"]:
        AutomationCreate.model_validate(AutomationCore.model_validate(automation).model_dump(mode="json"))
        with pytest.raises(ValidationError):
            AutomationCore.model_validate({**automation, "actions": [{"type": "unknown"}]})
        watched = automation["trigger"]["match_related"]["prefect.resource.name"]
        assert sorted(watched) == sorted([scheduled.name, study.name, train.name])


@pytest.mark.parametrize("deployment", FILE["deployments"], ids=lambda deployment: deployment["name"])
def test_a_deployment_fits_its_flow(deployment: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flow: Flow[..., Any] = load_flow_from_entrypoint(deployment["entrypoint"])
    inspect.signature(flow.fn).bind(**deployment["parameters"])
    if "config" in deployment["parameters"]:
        load_config(locate_shipped(deployment["parameters"]["config"]), deployment["parameters"]["overrides"])
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    for schedule in deployment.get("schedules", []):
        CronSchedule(**schedule)


def locate_shipped(path: str) -> Path:
    """The file in this repository that the images have at ``path``."""
    return ROOT / Path(path).relative_to("/opt/magrpo")


def test_the_study_that_is_deployed_is_usable(tmp_path: Path) -> None:
    [deployment] = [deployment for deployment in FILE["deployments"] if deployment["name"] == "study"]
    given = deployment["parameters"]
    assert load_study(locate_shipped(given["file"]), given["name"], tmp_path, locate_config).list_pilots()
    assert "schedules" not in deployment, "only a person starts it"


def test_the_night_goes_on_from_the_champion_that_the_week_evaluates() -> None:
    configs = {
        deployment["name"]: load_config(
            ROOT / "pipelines" / "configs" / "embedded.toml", deployment["parameters"]["overrides"]
        )
        for deployment in FILE["deployments"]
        if "overrides" in deployment["parameters"]
    }
    night, week = configs["nightly-champion"], configs["weekly-evaluation"]
    assert night.registry.model == week.registry.model
    assert (night.registry.continue_from_champion, night.registry.promote) == (True, True)
    assert (week.registry.continue_from_champion, week.train.num_iterations) == (True, 0)
