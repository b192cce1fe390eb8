"""Environments: roles, prompts and what happens between turns."""

TABLE = {
    "coding": "magrpo.envs.coding:CodingEnv",
    "writing": "magrpo.envs.writing:WritingEnv",
}
