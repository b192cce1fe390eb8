"""The model card of a team: how to use the agents, a real sample, their origin and their evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load, try_to_load_from_cache
from yaml import YAMLError

from magrpo.assets import locate_model, name_base
from magrpo.config.agents import AgentConfig
from magrpo.engines.vllm_arguments import MAX_RANKS
from magrpo.export.sample import choose_sample
from magrpo.export.team import TrainedTeam
from magrpo.interfaces import Problems
from magrpo.model.lineup import read_stop_tokens
from magrpo.reports.figures import tabulate_quantities
from magrpo.reports.origin import describe_origin
from magrpo.reports.page import render_template
from magrpo.reports.verdict import judge_run
from magrpo.run.config_diff import format_changed_values
from magrpo.run.files import describe_start, split_files
from magrpo.run.steps import Step

CARD = "README.md"
_FIRST_PORT = 8000
_SOURCES = {"MAGRPO": "2508.04652", "GRPO": "2402.03300", "IAC": "2601.21972", "MAAC": "2601.21972"}
"""The arXiv number of the paper that a method comes from; cards of other methods cite none."""


def _name_problem_file(problems: Problems) -> str:
    """The name of the local file from which a run reads its problems; empty if it is not one."""
    source = getattr(problems, "source", None)
    return Path(source).name if isinstance(source, str) and Path(source).is_file() else ""


def render_model_card(team: TrainedTeam, version: int | None = None) -> str:
    """Render the card in Markdown, after the front matter that hubs read.

    ``version``: that of the registered model from which, by the card, others download the agents. Without it, the
    card describes the folder that it is in.
    """
    config, store = team.config, team.store
    origin = dict(describe_origin(store, config))
    sample = choose_sample(team)
    title, fetch = f"Agents of run {store.run_id}", ""
    if version is not None:
        model = config.registry.model
        title = f"{model}, version {version}"
        fetch = (
            "# MLFLOW_TRACKING_URI names the MLflow that this is registered in\n"
            f"mlflow artifacts download --artifact-uri models:/{model}/{version} --dst-path agents\ncd agents"
        )
    prepared = Step("prepare", 0).output
    problems = store.pointer(prepared)
    sizes = store.manifest_of(prepared)["metrics"]
    trained = [agent for agent in config.agents if agent.trained]
    bases = list(_describe_bases(team))
    licences = {base["licence"] for base in bases}
    adapted = [agent for base in bases for agent in base["adapted"]]
    front_matter = ModelCardData(
        license=licences.pop() if len(licences) == 1 else None,
        base_model=[base["model"] for base in bases if not (base["shipped"] or base["is_folder"])] or None,
        pipeline_tag="text-generation",
        library_name="peft" if adapted else "transformers",
        tags=["magrpo", "multi-agent"],
    )
    return _render_card(
        "model_card.md.j2",
        front_matter,
        title=title,
        fetch=fetch,
        config=config,
        source=_SOURCES.get(config.method),
        dtype=team.dtype,
        merged=team.merged,
        # Only float32 gives, by transformers, what the run's own engine gave.
        may_differ=team.merged or config.model.dtype == "mixed" or team.dtype != "float32",
        problem_file=_name_problem_file(config.problems),
        iteration=team.iteration,
        parent=describe_start(store),
        run_id=store.run_id,
        trained=trained,
        frozen=[agent for agent in config.agents if not agent.trained],
        roles=", ".join(f"`{agent.name}` (role {agent.role})" for agent in trained),
        verdict=judge_run(team.report).sentence,
        bases=bases,
        adapted=adapted,
        ends={agent.name: read_stop_tokens(agent) for agent in config.agents},
        full=[agent for agent in config.agents if team.weights_of(agent) == "full"],
        code="; ".join(origin[name] for name in ("commit", "libraries") if name in origin),
        sample=sample,
        printed="\n\n\n".join(sample.answers.values()) if sample else "",
        parts=", ".join(f"{part} {value:.2f}" for part, value in sample.reward.parts.items()) if sample else "",
        servers=list(_plan_servers(team, bases)),
        evaluations=list(tabulate_quantities(team.report).values()),
        splits=[
            (split, f"{sizes[f'problems/{split}']:.0f}", store.file_digest(problems, path.name))
            for split, path in split_files(store.folder(problems)).items()
        ],
        changed=format_changed_values(team.portable_config()),
    )


def render_agent_card(team: TrainedTeam, agent: AgentConfig) -> str:
    """Render the card in the folder of one agent, which refers to the card of its team."""
    base, weights = name_base(agent.model), team.weights_of(agent)
    is_on_hub = locate_model(base) == base and not Path(base).is_dir()
    front_matter = ModelCardData(
        base_model=base if is_on_hub else None,
        pipeline_tag="text-generation",
        library_name="transformers" if weights == "full" else "peft",
        tags=["magrpo"],
    )
    return _render_card(
        "agent_card.md.j2",
        front_matter,
        agent=agent,
        weights=weights,
        base=f"`{base}`",
        num_agents=len(team.config.agents),
    )


def _render_card(template: str, front_matter: ModelCardData, **values: object) -> str:
    """Render front matter for hubs, then a template of this project, whose filters ``ModelCard`` does not know."""
    return f"---\n{front_matter.to_yaml()}\n---\n{render_template(template, **values)}"


def strip_heading(card: str) -> str:
    """Remove the front matter and the title of a card."""
    return card.partition("\n---\n")[2].partition("\n")[2]


def find_licence(base: str) -> str | None:
    """The licence by the model card of a base, which is a folder, a shipped model, or a hub id in the local cache."""
    folder = Path(locate_model(base))
    card: object = folder / CARD if folder.is_dir() else None
    if card is None and base.count("/") <= 1:
        card = try_to_load_from_cache(base, CARD)
    if not isinstance(card, (str, Path)) or not Path(card).is_file():
        return None
    try:
        stated = (metadata_load(card) or {}).get("license")
    except (ValueError, YAMLError):  # ValueError: no table, or no UTF-8
        return None
    licences = stated if isinstance(stated, list) else [stated]
    return ", ".join(str(licence) for licence in licences if licence) or None


def _describe_bases(team: TrainedTeam) -> Iterator[dict[str, Any]]:
    """Describe the base models with their agents. ``adapted``: the agents that need the base."""
    for model in sorted({agent.model for agent in team.config.agents}):
        agents = [agent for agent in team.config.agents if agent.model == model]
        shipped = locate_model(model) != model
        yield {
            "model": name_base(model),
            "licence": find_licence(model),
            "agents": agents,
            "adapted": [agent for agent in agents if team.weights_of(agent) != "full"],
            "shipped": shipped,
            "is_folder": not shipped and Path(model).is_dir(),
        }


def _plan_servers(team: TrainedTeam, bases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Plan one vLLM server for each base with adapters, and one for each agent that is a whole model."""
    full = [agent for agent in team.config.agents if team.weights_of(agent) == "full"]
    served = [(base["model"], base["adapted"]) for base in bases if base["adapted"]] + [("", [agent]) for agent in full]
    for port, (base, agents) in enumerate(served, start=_FIRST_PORT):
        rank = next((rank for rank in MAX_RANKS if rank >= team.config.lora.rank), None)
        if rank is not None or not base:  # vLLM takes no adapters of larger ranks
            yield {"base": base, "agents": agents, "port": port, "rank": rank}
