"""Rewards."""

TABLE = {
    "coding": "magrpo.rewards.coding:CodingReward",
    "solo": "magrpo.rewards.solo:SoloReward",
    "writing": "magrpo.rewards.writing:WritingReward",
}
