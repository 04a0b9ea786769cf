"""What one worker counts and times, kept until the next snapshot carries it to a gateway."""

from __future__ import annotations

from collections import defaultdict

MAX_OBSERVATIONS = 10_000
"""Per histogram between two snapshots; with no gateway to read them, later ones are dropped."""


class WorkerMetrics:
    """Counters only grow; observations (seconds) are handed out once. Named as in /metrics, without the prefix."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = defaultdict(float)
        self._observations: dict[str, list[float]] = defaultdict(list)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
        self._counters[f"{name}{{{pairs}}}" if pairs else name] += amount

    def observe(self, name: str, value: float) -> None:
        observations = self._observations[name]
        if len(observations) < MAX_OBSERVATIONS:
            observations.append(value)

    @property
    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def take_observations(self) -> dict[str, tuple[float, ...]]:
        """Everything observed since the last call, by histogram."""
        taken = {name: tuple(values) for name, values in self._observations.items() if values}
        self._observations.clear()
        return taken
