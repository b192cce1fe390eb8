"""CoMLRL's side, through its public trainer. Runs in .bench-venv."""

from __future__ import annotations

from pathlib import Path

from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset

from tests.benchmarks import workload
from tests.benchmarks.workload import GROUP_SIZE, NEW_TOKENS, Completions, Gradients, Meter


class Side:
    """One trainer with two agents, fully fine-tuned on the CPU in float32."""

    def __init__(self, folder: Path) -> None:
        self._meter = Meter()
        self._seen: list[Completions] = []
        args = MAGRPOConfig(
            num_train_epochs=1,
            num_agents=len(workload.AGENTS),
            agent_learning_rate=workload.LEARNING_RATE,
            agent_devices="cpu",
            num_generations=GROUP_SIZE,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_turns=1,
            eval_interval=0,
            rollout_buffer_size=workload.NUM_PROMPTS,  # one optimizer step an iteration, as on our side
            advantage_normalization=False,
        )
        self._trainer = MAGRPOTrainer(
            agents=[str(folder)] * len(workload.AGENTS),
            num_agents=len(workload.AGENTS),
            reward_func=self._reward,
            args=args,
        )
        self._trainer.verbose = False

    def iteration(self, prompts: list[str]) -> tuple[float, float]:
        """One iteration; seconds of its rollout and of its update.

        The trainer asks for rewards when a prompt's completions are there, and updates after those of the last prompt.
        """
        self._seen.clear()
        self._trainer.train_dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
        self._meter.start()
        self._trainer.train()
        return self._meter.stop()

    def sampled(self, prompts: list[str]) -> tuple[list[Completions], Gradients]:
        """One iteration; what was sampled in it, and the gradients of every agent by parameter."""
        with workload.gradients() as found:
            self.iteration(prompts)
        return list(self._seen), {
            name: {key: found[id(p)] for key, p in agent.named_parameters()}
            for name, agent in zip(workload.AGENTS, self._trainer.agents, strict=True)
        }

    def _reward(self, prompts: list[str], helper: list[str], main: list[str]) -> list[float]:
        """Called with one joint action."""
        texts = (helper[0], main[0])
        value = workload.reward(texts)
        self._seen.append(Completions(prompts[0], texts, value))
        self._meter.lap()
        return [value]
