"""The agents of a run, their base models and their adapters: the sections that the model code needs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from magrpo.algo.advantages import EstimatorName
from magrpo.assets import locate_model
from magrpo.errors import ConfigError, check_name
from magrpo.files.paths import expand_home
from magrpo.plugins import Section


def check_agent_name(name: str) -> str:
    """Return ``name`` if an agent can have it, else raise ConfigError.

    In the folder of trained agents a shipped base has a folder beside those of the agents.
    """
    if locate_model(check_name(name)) != name:
        raise ConfigError(f"{name!r} is the name of a base model that ships with the project: choose another one")
    return name


def _expand_model(model: str) -> str:
    return str(expand_home(model)) if model.startswith("~") else model


class AgentConfig(Section):
    """One agent."""

    name: Annotated[str, AfterValidator(check_agent_name)]
    """Name of the agent in metrics, artifacts and adapters."""
    role: str = Field("", validate_default=True)
    """Role of the agent in the environment, such as ``helper`` or ``main``. Empty: its name."""
    model: Annotated[str, AfterValidator(_expand_model)]
    """Base model: a folder, a hub id, or a shipped model (``coopcode-base``, ``writing-base``)."""
    weights: Literal["lora", "shared", "full"] = "lora"
    """``lora``: the agent trains its own adapter on the frozen base; ``shared``: all ``shared`` agents of a base train
    one adapter (parameter sharing); ``full``: the agent trains all weights of its own copy of the base."""
    start_from: Annotated[Path, AfterValidator(expand_home)] | None = None
    """Folder of trained weights to start from: ``weights/<agent>`` of a checkpoint, ``agents/<agent>`` of a run, or an
    adapter saved by peft with the rank, scale and layers of the section ``lora``. None: start untrained."""
    trained: bool = True
    """Whether the agent trains. If false, its weights stay fixed and it has no optimizer."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate of the agent; it follows the schedule of ``optim``. None: ``optim.lr``."""
    estimator: EstimatorName | None = None
    """Advantage estimator of the agent. None: ``algo.estimator``."""

    @field_validator("role", mode="after")
    @classmethod
    def _is_name_by_default(cls, value: str, info: ValidationInfo) -> str:
        return value or str(info.data.get("name", ""))


def weight_holders(agents: Sequence[AgentConfig]) -> dict[str, str]:
    """The agent whose weights each agent acts with, by name: itself, or the first agent that shares its adapter."""
    first: dict[str, str] = {}
    return {
        agent.name: first.setdefault(agent.model, agent.name) if agent.weights == "shared" else agent.name
        for agent in agents
    }


def trained_holders(agents: Sequence[AgentConfig]) -> list[str]:
    """The trained adapters and copies, each named by the agent that holds it."""
    holders = weight_holders(agents)
    return [agent.name for agent in agents if agent.trained and holders[agent.name] == agent.name]


def count_models(agents: Iterable[AgentConfig]) -> int:
    """The number of models that agents run: their base models, and full copies."""
    return len({agent.name if agent.weights == "full" else ("base", agent.model) for agent in agents})


def start_weights(agents: Sequence[AgentConfig]) -> dict[str, Path]:
    """Folder of trained weights for each agent that starts from one, by name."""
    return {agent.name: agent.start_from for agent in agents if agent.start_from is not None}


class ModelConfig(Section):
    """How base models are loaded."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the policies. ``auto``: CUDA if available, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    """Precision of the frozen base. ``auto``: bfloat16 on CUDA, float32 on a CPU, or ``mixed`` if a run with adapters
    on a base of 50 million parameters or more measures at its start that this is faster. ``mixed``: linear layers
    multiply in bfloat16, all else is float32, logits included. Trained weights are always float32."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Precision of logits, in the engine and in the update. ``auto``: the precision of the matrix products;
    ``float32``: logits of half-precision models are not rounded to half precision."""
    chat_template: Literal["auto", "none"] = "auto"
    """``auto``: render prompts with the tokenizer's chat template if it has one; ``none``: never use a template."""


class LoraConfig(Section):
    """The adapters of agents with ``weights = "lora"`` or ``"shared"``."""

    rank: int = Field(16, ge=1, le=4096)
    """Rank of the adapter matrices."""
    alpha: float = Field(32.0, gt=0)
    """Scale of an adapter: its output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Names of the linear layers that get an adapter."""
