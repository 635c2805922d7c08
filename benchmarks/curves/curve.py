"""A measured curve: values over a quantity that grows, the power with which they grow, and their slope."""

import math
from dataclasses import asdict, dataclass

# Powers up to these count as flat and as linear.
FLAT, LINEAR = 0.2, 1.2


@dataclass(frozen=True)
class Series:
    """One measured quantity, a value for each point of its curve."""

    name: str
    unit: str
    values: list[float]


@dataclass(frozen=True)
class Curve:
    """Series over the same points; `x` says what they count."""

    name: str
    x: str
    points: list[int]
    series: list[Series]

    def power(self, series):
        """The exponent of growth: 0 is flat, 1 is linear. Least squares of logarithms."""
        pairs = [(math.log(x), math.log(y)) for x, y in zip(self.points, series.values, strict=True) if y > 0]
        return _slope(pairs)

    def slope(self, series):
        """What one more adds, in the series' unit. Least squares."""
        return _slope(list(zip(self.points, series.values, strict=True)))

    def verdict(self, series):
        """Whether it grows as it should: flat, at most linear, or faster."""
        power = self.power(series)
        return "flat" if power <= FLAT else "at most linear" if power <= LINEAR else "FASTER THAN LINEAR"

    @classmethod
    def of(cls, found):
        """The curve that `to_json` made plain data of."""
        series = [Series(each["name"], each["unit"], each["values"]) for each in found["series"]]
        return cls(found["name"], found["x"], found["points"], series)

    def to_json(self):
        """Plain data, with power and slope of each series."""
        told = [{"power": self.power(each), "slope": self.slope(each)} for each in self.series]
        found = asdict(self)
        for each, more in zip(found["series"], told, strict=True):
            each.update(more)
        return found


def show(curve):
    """Print a curve as a table."""
    print(f"{curve.name}: {curve.x} {', '.join(map(str, curve.points))}")
    for series in curve.series:
        values = ", ".join(f"{value:.4g}" for value in series.values)
        print(
            f"  {series.name} ({series.unit}): {values}   power {curve.power(series):.2f} ({curve.verdict(series)}), "
            f"{curve.slope(series):.3g} for each more"
        )
    print(flush=True)


def _slope(pairs):
    """The slope of the line through points, by least squares; 0 for fewer than two."""
    if len(pairs) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread if spread else 0.0
