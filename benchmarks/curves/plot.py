"""Plots as SVG files."""


def draw(curve, directory):
    """Draw a curve, a panel for each of its series; return the file. Raises SystemExit where matplotlib is missing."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, len(curve.series), figsize=(4 * len(curve.series), 2.8), squeeze=False)
    for panel, series in zip(panels[0], curve.series, strict=True):
        panel.plot(curve.points, series.values, marker="o", color="#0068b5")
        panel.set_xscale("log")
        panel.set_yscale("log" if curve.power(series) > 0.5 else "linear")
        if curve.power(series) <= 0.5:
            panel.set_ylim(0, max(series.values) * 1.3 or 1)
        panel.set_xlabel(curve.x)
        panel.set_title(f"{series.name} [{series.unit}]", fontsize=9)
        panel.grid(visible=True, alpha=0.3)
    return _save(figure, directory / f"curve-{curve.name.replace(' ', '-')}.svg")


def draw_ratios(title, figures, file):
    """Draw the ratios of figures to their baseline, with their spread (see `harness.Figure`); return the file."""
    figures = [figure for figure in figures if figure["ratios"]]
    pyplot = load_pyplot()
    figure, panel = pyplot.subplots(figsize=(8, 0.4 * len(figures) + 1))
    for row, each in enumerate(reversed(figures)):
        ratios = sorted(each["ratios"])
        middle = ratios[len(ratios) // 2]
        spread = [[middle - ratios[0]], [ratios[-1] - middle]]
        panel.barh(row, middle, xerr=spread, color="#0068b5", height=0.6, ecolor="#888888")
        if each["target"] is not None:
            panel.plot([each["target"]] * 2, [row - 0.4, row + 0.4], color="#c81326")
    panel.axvline(1.0, color="#888888", linewidth=0.8)
    panel.set_yticks(range(len(figures)), [each["name"] for each in reversed(figures)], fontsize=8)
    panel.set_title(f"{title}: ÷ baseline, with spread; red: target", fontsize=9)
    return _save(figure, file)


def load_pyplot():
    """The library that draws. Raises SystemExit where it is missing: asked for before a run, not after it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("plots need matplotlib: pip install matplotlib (extra bench)") from None
    matplotlib.use("svg")
    # Text stays text, and the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "npu-node"})
    from matplotlib import pyplot

    return pyplot


def _save(figure, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file, format="svg", metadata={"Date": None})
    load_pyplot().close(figure)
    return file
