"""Warnings about valid configurations: biased gradients, values that work against each other, unused options."""

from collections.abc import Collection, Iterator

from magrpo.algo.advantages import ESTIMATORS
from magrpo.checks.envs import count_priced_turns
from magrpo.config.agents import LoraConfig, start_weights
from magrpo.config.run import RunConfig
from magrpo.config.sections import CriticConfig
from magrpo.envs.program import AgentProgram
from magrpo.plugins import Section


def list_config_warnings(config: RunConfig) -> list[str]:
    """Return warnings about valid values that users of the run should know of, one line each."""
    if config.train.num_iterations == 0:
        return []
    crediting = [agent for agent in config.agents if agent.trained and config.algo.loss != "madpo"]
    chosen = dict.fromkeys(config.estimator_of(agent) for agent in crediting)
    found = [f"estimator {name!r}: {ESTIMATORS[name].bias}" for name in chosen if ESTIMATORS[name].bias]
    if config.algo.lenience:
        found.append(
            f"algo.lenience = {config.algo.lenience:g}: completions are compared by what they earn with their best "
            "partners, not on average, so the gradient is biased"
        )
    if config.algo.normalize == "std":
        found.append(
            "algo.normalize = 'std': groups with nearly equal returns weigh as much as groups with very different "
            "ones; the paper does not divide by the standard deviation"
        )
    starts_trained = config.registry.continue_from_champion or start_weights(
        [agent for agent in config.agents if agent.trained]
    )
    if config.algo.beta > 0 and starts_trained:
        found.append(
            f"algo.beta = {config.algo.beta:g} pulls agents that start from trained weights back towards their base "
            "model, which is the reference of the penalty; set algo.beta = 0 to keep what they have learnt"
        )
    if config.algo.loss == "madpo" and config.algo.update_epochs == 1:
        found.append(
            "algo.loss = 'madpo' with one epoch never leaves the margin 0, where only the order of returns "
            "matters; set algo.update_epochs to 2 or more"
        )
    found += _list_unused_options(config)
    if long_warmup := config.optim.describe_long_warmup(config.train.num_iterations):
        found.append(long_warmup)
    return found


def _list_unused_options(config: RunConfig) -> Iterator[str]:
    """Warnings about options that are set, but have no effect beside the others."""
    sections: dict[str, Section] = {f"agents.{agent.name}": agent for agent in config.agents}
    sections |= {
        name: getattr(config, name) for name in ("reward", "lora", "rollout", "algo", "optim", "critic", "eval")
    }
    changed = [
        f"{name}.{option}"
        for name, section in sections.items()
        for option, field in type(section).model_fields.items()
        if getattr(section, option) != field.default
    ]
    for reason, keys in _list_ineffective(config):
        if unused := [key for key in changed if key in keys]:
            has, them = ("has", "the option") if len(unused) == 1 else ("have", "the options")
            yield f"{', '.join(unused)} {has} no effect, because {reason}, or leave {them} out"


def _list_ineffective(config: RunConfig) -> Iterator[tuple[str, Collection[str]]]:
    """Reasons why options have no effect in this run, each with a remedy and these options, set or not."""
    if config.env.num_turns == 1:
        later = ("rollout.tree", "rollout.termination_threshold", "algo.gamma", "critic.gae_lambda", "eval.stop_above")
        yield "episodes have one turn; set env.num_turns to 2 or more, if the environment has this key", later
    elif count_priced_turns(config.env) == 1:
        early = ("rollout.termination_threshold", "eval.stop_above")
        yield "no turn before the last is priced; set env.num_turns to more, if the environment can take it", early
    else:
        limits = {
            "rollout.termination_threshold": config.rollout.termination_threshold,
            "eval.stop_above": config.eval.stop_above,
        }
        never = [key for key, limit in limits.items() if limit is not None and config.reward.fraction(limit) >= 1]
        yield "no reward exceeds its maximum; set a smaller value", never
    if not config.trains_critics:
        critic = [f"critic.{option}" for option in CriticConfig.model_fields]
        yield "no trained agent has an estimator with a critic; set algo.estimator to one", critic
    if config.algo.loss == "madpo":
        estimators = [f"agents.{agent.name}.estimator" for agent in config.agents]
        unused = ("algo.estimator", *estimators, "algo.clip_low", "algo.clip_high", "reward.local_weight")
        yield "preferences take no estimator, ratio or local reward; set algo.loss to 'policy_gradient'", unused
    else:
        yield "algo.loss is not 'madpo'; set it", ("algo.preference_beta",)
        if config.algo.update_epochs == 1:
            ratio = ("algo.ratio", "algo.clip_low", "algo.clip_high")
            yield "in the only epoch every ratio is 1; set algo.update_epochs to 2 or more", ratio
    if isinstance(config.env, AgentProgram):
        yield "programs write their prompts themselves; shorten these there", ("rollout.leave_out_long",)
    else:
        yield "only programs ask an agent several times; set env.kind to 'program'", ("algo.siblings",)
    if (most := max(config.count_acting())) == 1:
        yield "at most one agent acts at a turn; let several act at once", ("rollout.joint_mode",)
    elif (config.rollout.crossed_pairs or 0) >= config.rollout.group_size**most:
        yield "a node has no more joint actions; set a smaller value", ("rollout.crossed_pairs",)
    if config.rollout.top_p == 1 and config.rollout.top_k == 0:
        yield "no token is left out of a sample; set rollout.top_p or rollout.top_k", ("rollout.keep_support",)
    if all(agent.weights == "full" for agent in config.agents):
        lora = [f"lora.{option}" for option in LoraConfig.model_fields]
        yield "no agent has an adapter; set the weights of one to 'lora'", lora
    if config.rollout.probe_size is None:
        yield "nothing is probed; set rollout.probe_size", ("rollout.max_draws",)
    if all(agent.lr is not None for agent in config.agents if agent.trained):
        yield "every trained agent has an lr of its own; remove these", ("optim.lr",)
    untrained = [f"agents.{agent.name}.lr" for agent in config.agents if not agent.trained]
    yield "untrained agents keep their weights; set trained = true", untrained
