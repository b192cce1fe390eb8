"""Rewards."""

TABLE = {
    "coding": "magrpo.rewards.coding:CodingReward",
    "solo": "magrpo.rewards.solo:SoloReward",
    "team": "magrpo.rewards.team:TeamReward",
    "writing": "magrpo.rewards.writing:WritingReward",
}
