"""The model card of a registered team: its origin, its evaluation, and how to use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from huggingface_hub import ModelCard, try_to_load_from_cache

from magrpo.assets import locate_model
from magrpo.config import AgentConfig, RunConfig
from magrpo.config_diff import list_changed_values
from magrpo.engines.vllm import MAX_RANKS
from magrpo.layout import split_files
from magrpo.reports.run import RunReport
from magrpo.store import Pointer, RunStore
from magrpo.types import EvalReport

NOT_STATED = "not stated by its model card"


def render_model_card(
    store: RunStore,
    version: int,
    parent: str,
    reports: Sequence[EvalReport],
    problems: Pointer,
    code: Mapping[str, str],
) -> str:
    """The card in Markdown, after the front matter that hubs read.

    Args:
        parent: the weights that training started from, in words.
        reports: the evaluations of the run in their order.
        code: the tags of :func:`magrpo.tracking.collect_provenance`.
    """
    config = store.config()
    assert config.registry.model is not None
    agents = ", ".join(f"`{agent.name}` (role {agent.role})" for agent in config.agents)
    lines = [
        *_front_matter(config),
        f"# {config.registry.model}, version {version}",
        "",
        f"{agents}, trained together with MAGRPO ([arXiv 2508.04652](https://arxiv.org/abs/2508.04652)). They "
        "answer as a team: each learned to work with the others of this version, so versions should not be mixed.",
        "",
        "| | |",
        "|---|---|",
        f"| run | `{store.run_id}`, {config.train.num_iterations} iterations, seed {config.train.seed} |",
        f"| continued from | {parent} |",
        *(
            f"| base of {_list_names(members)} | `{base}`; licence: {find_licence(base) or NOT_STATED} |"
            for base, members in _bases(config)
        ),
        f"| code | {_describe_code(code)} |",
        "",
        "## Evaluation",
        "",
        *_evaluation_lines(reports, config),
        "",
        "## Use",
        "",
        *_usage_lines(config, version),
        "",
        "## Data",
        "",
        f"Problem set `{config.problems.kind}`; the digests are of the files `problems` in the artifacts of the run.",
        "",
        "| split | problems | SHA-256 |",
        "|---|---:|---|",
        *_data_lines(store, problems),
        "",
        "## Configuration",
        "",
        "`config.json` beside this card is complete. Values that differ from their defaults, or have none:",
        "",
        "```",
        *list_changed_values(config),
        "```",
    ]
    return "\n".join(lines) + "\n"


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


def _front_matter(config: RunConfig) -> list[str]:
    bases = [base for base, _ in _bases(config)]
    stated = {find_licence(base) for base in bases}
    lines = ["---", *(f"license: {stated.pop()}" for _ in [0] if len(stated) == 1 and None not in stated)]
    return [*lines, "base_model:", *(f"- {json.dumps(base)}" for base in bases), "tags:", "- magrpo", "---"]


def _bases(config: RunConfig) -> list[tuple[str, list[AgentConfig]]]:
    """Each base model and the agents on it."""
    agents = sorted(config.agents, key=lambda agent: agent.model)
    return [(base, list(members)) for base, members in groupby(agents, key=lambda agent: agent.model)]


def _list_names(agents: Sequence[AgentConfig]) -> str:
    return ", ".join(f"`{agent.name}`" for agent in agents)


def _describe_code(code: Mapping[str, str]) -> str:
    commit = code.get("mlflow.source.git.commit")
    changed = ", with uncommitted changes" if code.get("git.dirty") == "true" else ""
    versions = [
        f"{name.removeprefix('version.')} {value}" for name, value in code.items() if name.startswith("version.")
    ]
    return "; ".join([*([f"commit `{commit}`{changed}"] if commit else []), ", ".join(versions)])


def _evaluation_lines(reports: Sequence[EvalReport], config: RunConfig) -> list[str]:
    tables = RunReport(config, reports, [], {}).evaluation_tables()
    return [line for table in tables for line in (f"### {table.title}", "", *table.markdown_lines(), "")][:-1]


def _data_lines(store: RunStore, problems: Pointer) -> list[str]:
    sizes = store.metrics(problems)
    return [
        f"| {split} | {sizes[f'problems/{split}']:.0f} | `{store.file_digest(problems, path.name)}` |"
        for split, path in split_files(store.folder(problems)).items()
    ]


def _usage_lines(config: RunConfig, version: int) -> list[str]:
    """How to download (to the folder ``agents``), load and serve the agents."""
    lines = [
        "Fetch the folders of all agents, with `MLFLOW_TRACKING_URI` naming the MLflow this is registered in:",
        "",
        "```sh",
        f"mlflow artifacts download --artifact-uri models:/{config.registry.model}/{version} --dst-path agents",
        "```",
    ]
    for base, agents in _bases(config):
        adapted = [agent for agent in agents if agent.weights != "full"]
        if adapted:
            lines += [
                "",
                f"{_list_names(adapted)} with peft, on one base in memory:",
                "",
                *_peft_lines(locate_model(base), adapted),
            ]
            lines += ["", "The same behind one vLLM server, each a model by its name:", ""]
            lines += ["```sh", _serve_command(locate_model(base), adapted, config.lora.rank), "```"]
        for agent in agents:
            if agent.weights == "full":
                lines += ["", f"`{agent.name}` is a model of its own:", "", *_transformers_lines(agent.name)]
                lines += ["", "```sh", f"vllm serve agents/{agent.name} --served-model-name {agent.name}", "```"]
    return lines


def _peft_lines(base: str, agents: Sequence[AgentConfig]) -> list[str]:
    first, *others = [agent.name for agent in agents]
    return [
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"base = {json.dumps(base)}",
        "tokenizer = AutoTokenizer.from_pretrained(base)",
        "model = AutoModelForCausalLM.from_pretrained(base)",
        f'model = PeftModel.from_pretrained(model, "agents/{first}", adapter_name="{first}")',
        *(f'model.load_adapter("agents/{name}", adapter_name="{name}")' for name in others),
        f'model.set_adapter("{first}")  # the agent that answers',
        "```",
    ]


def _transformers_lines(name: str) -> list[str]:
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("agents/{name}")',
        f'model = AutoModelForCausalLM.from_pretrained("agents/{name}")',
        "```",
    ]


def _serve_command(base: str, agents: Sequence[AgentConfig], rank: int) -> str:
    rank = next(size for size in MAX_RANKS if size >= rank)
    modules = " ".join(f"{agent.name}=agents/{agent.name}" for agent in agents)
    options = f"--enable-lora --max-loras {len(agents)} --max-lora-rank {rank} --lora-modules {modules}"
    return f"vllm serve {shlex.quote(base)} {options}"
