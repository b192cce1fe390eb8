"""Rewards."""

TABLE = {
    "coding": "magrpo.rewards.coding:CodingReward",
    "writing": "magrpo.rewards.writing:WritingReward",
}
