"""Environments: roles, prompts and what happens between turns."""

TABLE = {
    "coding": "magrpo.envs.coding:CodingEnv",
    "solo": "magrpo.envs.solo:SoloEnv",
    "sequential": "magrpo.envs.sequential:SequentialEnv",
    "team": "magrpo.envs.team:TeamEnv",
    "writing": "magrpo.envs.writing:WritingEnv",
}
