"""Environments: roles, prompts and what happens between turns."""

TABLE = {
    "coding": "magrpo.envs.coding:CodingEnv",
    "solo": "magrpo.envs.solo:SoloEnv",
    "writing": "magrpo.envs.writing:WritingEnv",
}
