"""A stand-in for the module `time` that moves only when told."""


class FakeTime:
    """Wall and CPU time that only move when told; sleeping moves the wall's."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 100.0
        self.slept_s: list[float] = []

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds
        self.slept_s.append(seconds)

    def compute(self, cpu_s: float, *, wall_s: float | None = None) -> None:
        self.cpu_s += cpu_s
        self.wall_s += cpu_s if wall_s is None else wall_s

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds


class Arriving:
    """A message that arrives after a while."""

    def __init__(self, fake: FakeTime, seconds: float) -> None:
        self.fake, self.seconds = fake, seconds

    def wait(self) -> None:
        self.fake.wait(self.seconds)
