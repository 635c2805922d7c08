"""One page of a run: the machine, whether it was quiet, and a plot and a table for each benchmark."""

from benchmarks.curves.curve import Curve
from benchmarks.curves.plot import draw, draw_ratios


def write(directory, results):
    """Write index.md and its plots into a directory; `results` are those of the command. Returns the page."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = ["# Benchmarks", ""]
    lines += [f"- {name}: {value}" for name, value in results["machine"].items()]
    lines += ["", results["quiet"]["line"], ""]
    for name, figures in results["figures"].items():
        lines += [f"## {name}", ""]
        if any(figure.get("ratios") for figure in figures):
            lines += [f"![{name}]({draw_ratios(name, figures, directory / f'{name}.svg').name})", ""]
        for curve in (Curve.of(figure) for figure in figures if "series" in figure):
            lines += [f"![{curve.name}]({draw(curve, directory).name})", "", *_curve_table(curve)]
        lines += _table(figures)
    page = directory / "index.md"
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


def _curve_table(curve):
    """The values at each point, and how they grow."""
    lines = [f"| {curve.x} | {' | '.join(map(str, curve.points))} | power | for each more |"]
    lines.append("|---" * (len(curve.points) + 3) + "|")
    for series in curve.series:
        values = " | ".join(f"{value:.4g}" for value in series.values)
        growth = f"{curve.power(series):.2f} ({curve.verdict(series)}) | {curve.slope(series):.3g}"
        lines.append(f"| {series.name}, {series.unit} | {values} | {growth} |")
    return [*lines, ""]


def _table(figures):
    """Medians with their spread; nothing for what is no figure of the harness."""
    rows = [figure for figure in figures if "median" in figure]
    if not rows:
        return []
    lines = ["| what | median | spread | ÷ baseline | target |", "|---|---|---|---|---|"]
    for figure in rows:
        ratios = sorted(figure["ratios"])
        ratio = f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})" if ratios else ""
        spread = f"{min(figure['values']):.4g} … {max(figure['values']):.4g}"
        value = f"{figure['median']:.4g} {figure['unit']}"
        lines.append(f"| {figure['name']} | {value} | {spread} | {ratio} | {figure['target'] or ''} |")
    return [*lines, ""]
