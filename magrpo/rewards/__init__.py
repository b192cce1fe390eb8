"""Rewards."""

TABLE = {"coding": "magrpo.rewards.coding:CodingReward"}
