"""Value heads: what they learn, how they keep their values, and their features and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from magrpo.errors import ConfigError
from magrpo.model.critic import Critic, Fit, count_features, encode_prompts, read_critics, write_critics
from tests.tiny import perturb, tiny_policy


def observations(num: int = 64) -> torch.Tensor:
    return torch.randn(num, 8, generator=torch.Generator().manual_seed(0))


def returns_of(features: torch.Tensor) -> list[float]:
    """Far from 0, with a large scale."""
    return [float(1000 + 50 * row[0] - 20 * row[3]) for row in features]


def test_a_critic_learns_returns_of_any_scale() -> None:
    critic, features = Critic(8, lr=3e-2), observations()
    targets = returns_of(features)
    assert not critic.has_learnt
    assert critic.value(features[:2]) == [0.0, 0.0]
    critic.fit(features, targets, epochs=1)
    assert critic.value(features) == pytest.approx(targets, abs=200), "the mean is known at once"
    critic.fit(features, targets, epochs=200)
    after = Fit.of(critic.value(features), targets)
    assert after.explained_variance is not None
    assert after.explained_variance > 0.95


def test_new_returns_rescale_the_head_but_move_no_value() -> None:
    critic, features = Critic(8, lr=1e-2), observations()
    critic.fit(features, returns_of(features), epochs=20)
    before = critic.value(features)
    critic.fit(features, [5000.0] * len(features), epochs=0)
    assert critic.value(features) == pytest.approx(before, abs=1e-2)


@pytest.mark.parametrize("same", [0.0, 0.1, 2.3, -1 / 3])
def test_equal_returns_leave_no_deviation_behind(same: float) -> None:
    """As long as all returns are equal, values are normalised by 1, which is no deviation that was seen."""
    critic, features, returns = Critic(8, lr=1e-2), observations(), [0.01, 0.03] * 32
    for count, epochs in ((61, 1), (3, 0)):  # whose means are rounded
        critic.fit(features[:count], [same] * count, epochs)
        assert critic.state()["returns"]["std"] == 0.0
    assert critic.value(features) == pytest.approx([same] * 64, abs=1e-6)
    critic.fit(features, returns, epochs=0)
    seen = torch.tensor([same] * 64 + returns, dtype=torch.float64)
    assert critic.state()["returns"]["std"] == pytest.approx(float(seen.std(correction=0)))
    assert critic.value(features) == pytest.approx([same] * 64, abs=1e-6)


def test_fit_by_hand() -> None:
    assert Fit.of([1.0, 3.0], [2.0, 4.0]) == Fit(1.0, 0.0)
    assert Fit.of([2.0, 4.0], [2.0, 4.0]) == Fit(0.0, 1.0)
    assert Fit.of([1.0, 1.0], [2.0, 2.0]) == Fit(1.0, None)
    for same in (0.1, 0.7, 2.3, 1 / 3):  # whose mean is rounded
        assert all(Fit.of([0.0] * count, [same] * count).explained_variance is None for count in range(2, 50))


def test_a_restored_critic_goes_on_bit_for_bit(tmp_path: Path) -> None:
    critic, features = Critic(8, lr=1e-2), observations()
    critic.fit(features, returns_of(features), epochs=3)
    write_critics(tmp_path / "critics.pt", {"main": critic})
    again = read_critics(tmp_path / "critics.pt", lr=1e-2)["main"]
    for one in (critic, again):
        one.fit(features, returns_of(features), epochs=3)
    assert critic.value(features) == again.value(features)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "critics.pt").write_bytes(b"not a file of torch")
    with pytest.raises(ConfigError, match=r"critics.pt: holds no critics"):
        read_critics(tmp_path / "critics.pt", lr=1e-2)


def test_features_are_those_of_the_frozen_base_and_of_each_prompt_alone(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    prompts = [(5, 6, 7), (8, 9), (5, 6, 7), (10, 11, 12, 13)]
    counted: list[int] = []
    features = encode_prompts(policy, "main", prompts, 8, counted.append)
    assert features.shape == (4, count_features(policy, "main"))
    assert sum(counted) == 4
    assert torch.equal(features[0], features[2])
    perturb(policy, seed=1)
    [alone] = encode_prompts(policy, "main", prompts[1:2], 8, counted.append)
    torch.testing.assert_close(features[1], alone)
