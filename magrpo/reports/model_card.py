"""The model card of a registered team: its origin, its evaluation, and how to use it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, try_to_load_from_cache

from magrpo.assets import locate_model
from magrpo.config_diff import list_changed_values
from magrpo.engines.vllm import MAX_RANKS
from magrpo.layout import split_files
from magrpo.reports.page import render_template
from magrpo.reports.run import RunReport
from magrpo.store import Pointer, RunStore
from magrpo.types import EvalReport


def render_model_card(
    store: RunStore,
    version: int,
    parent: str,
    reports: Sequence[EvalReport],
    problems: Pointer,
    code: Mapping[str, str],
) -> str:
    """The card in Markdown, after the front matter that hubs read.

    ``parent``: the weights that training started from, in words; ``reports``: its evaluations in their order;
    ``code``: the tags of :func:`magrpo.tracking.provenance.collect_provenance`.
    """
    config, sizes = store.config(), store.metrics(problems)
    models = sorted({agent.model for agent in config.agents})
    bases = [
        {
            "model": model,
            "path": locate_model(model),
            "licence": find_licence(model),
            "agents": [agent for agent in config.agents if agent.model == model],
        }
        for model in models
    ]
    licences = {base["licence"] for base in bases}
    return render_template(
        "model_card.md.j2",
        config=config,
        version=version,
        parent=parent,
        run_id=store.run_id,
        roles=", ".join(f"`{agent.name}` (role {agent.role})" for agent in config.agents),
        bases=bases,
        licence=licences.pop() if len(licences) == 1 else None,
        max_ranks=MAX_RANKS,
        code=_describe_code(code),
        evaluations=RunReport(store.run_id, store, config, reports).evaluation_tables(),
        splits=[
            (split, f"{sizes[f'problems/{split}']:.0f}", store.file_digest(problems, path.name))
            for split, path in split_files(store.folder(problems)).items()
        ],
        changed=list_changed_values(config),
    )


def strip_heading(card: str) -> str:
    """The card without its front matter and title."""
    return card.partition("\n---\n")[2].partition("\n")[2]


def find_licence(base: str) -> str | None:
    """The licence stated by the model card of a base: a folder, a shipped model, or a hub id in the local cache."""
    folder = Path(locate_model(base))
    card: object = folder / "README.md" if folder.is_dir() else None
    if card is None and base.count("/") <= 1:
        card = try_to_load_from_cache(base, "README.md")
    if not isinstance(card, (str, Path)) or not Path(card).is_file():
        return None
    stated = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get("license")
    return str(stated) if stated else None


def _describe_code(code: Mapping[str, str]) -> str:
    """The commit, if it is known, and the versions of the libraries."""
    commit = code.get("mlflow.source.git.commit")
    changed = ", with uncommitted changes" if code.get("git.dirty") == "true" else ""
    versions = [f"{key.removeprefix('version.')} {code[key]}" for key in code if key.startswith("version.")]
    return "; ".join([*([f"commit `{commit}`{changed}"] if commit else []), ", ".join(versions)])
