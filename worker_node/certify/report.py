"""The report of a certification: one HTML file that needs nothing from elsewhere, and a summary for an issue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from worker_node.models.passports import Passport

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .35rem .6rem; vertical-align: top; border-bottom: 1px solid var(--line); }
.passed, .certified { color: #1a7f37; } .skipped { color: #777; }
.failed, .limited { color: #c62828; font-weight: 600; }
svg { max-width: 100%; height: auto; } text { font: 11px system-ui, sans-serif; fill: currentColor; }
td { overflow-wrap: anywhere; }
"""
_EMULATED = "Emulated on a CPU: this says nothing about real hardware."
# What is plotted by the tokens of the prompt, by the name of a check's value.
_PLOTS = {
    "first_token_s": "Seconds to the first token, by tokens of the prompt",
    "margins": "How much likelier the CPU finds another token where answers part, by tokens of the prompt",
}
# Of a plot, in pixels: the space of the axes is kept free at the left and below.
_WIDTH, _HEIGHT, _LEFT, _BELOW, _MARGIN = 660, 220, 48, 28, 20


def summary(passport: Passport) -> str:
    """What an issue can take, in Markdown."""
    facts = "; ".join(f"{name} {value}" for name, value in _facts(passport).items())
    lines = [f"### {_heading(passport)}", "", facts, ""]
    if passport.emulated:
        lines += [_EMULATED, ""]
    lines += ["| check | result | found |", "|---|---|---|"]
    lines += [f"| {check.name} | {check.status} | {check.detail.replace('|', '/')} |" for check in passport.checks]
    return "\n".join(lines) + "\n"


def page(passport: Passport) -> str:
    """The report as HTML."""
    heading = escape(_heading(passport))
    facts = {**_facts(passport), "node": passport.node, "model hash": passport.model_hash}
    checks = [
        _row(check.name, check.status, check.detail, ", ".join(map(str, check.facts)), style=check.status)
        for check in passport.checks
    ]
    parts = [
        f'<h1 class="{passport.verdict}">{heading}</h1>',
        f"<p><strong>{_EMULATED}</strong></p>" if passport.emulated else "",
        "<h2>What it holds for</h2>",
        "<table>",
        *(_row(name, value) for name, value in facts.items()),
        "</table><h2>Checks</h2><table><tr><th>check</th><th>result</th><th>found</th><th>facts</th></tr>",
        *checks,
        "</table><p>Facts are the numbers of docs/npu-facts.md.</p>",
        *_plots(passport),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{heading}</title><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _heading(passport: Passport) -> str:
    emulated = " (emulated)" if passport.emulated else ""
    return f"{passport.model} on {passport.device}: {passport.verdict}{emulated}"


def _facts(passport: Passport) -> dict[str, str]:
    limit = passport.limits.max_prompt_tokens
    return {
        "device": f"{passport.device}, {passport.architecture}",
        "driver": passport.driver or "-",
        "compiler": passport.compiler or "-",
        "OpenVINO": passport.openvino,
        "npu-node": passport.version,
        "made": passport.made,
        "compared with": passport.reference,
        **_power(passport),
        "signed by": passport.signature.key if passport.signature else "nobody",
        **({} if limit is None else {"prompts up to": f"{limit} tokens"}),
    }


def _power(passport: Passport) -> dict[str, str]:
    """What supplied the machine, what bounded the NPU's frequency, and what a joule did, as far as they are known."""
    power, facts = passport.power, {}
    if power.source is not None:
        watts = "" if power.adapter_watts is None else f", an adapter of {power.adapter_watts:g} W"
        facts["power"] = f"{power.source}{watts}"
    limits = [f"{name} {mhz}" for name, mhz in power.npu_mhz.model_dump().items() if mhz is not None]
    if limits:
        facts["MHz of the NPU"] = ", ".join(limits)
    for name, value in passport.efficiency.model_dump().items():
        if value is not None:
            facts[name.replace("_", " ")] = f"{value:g}"
    return facts


def _row(*cells: str, style: str = "") -> str:
    return f'<tr class="{style}">' + "".join(f"<td>{escape(text)}</td>" for text in cells) + "</tr>"


def _plots(passport: Passport) -> Iterator[str]:
    for check in passport.checks:
        lengths = check.values.get("lengths")
        for name, title in _PLOTS.items():
            values = check.values.get(name)
            if isinstance(lengths, list) and isinstance(values, list) and len(lengths) == len(values) > 0:
                bound = check.values.get("bound") if name == "margins" else None
                yield f"<h2>{title}</h2>{_plot(lengths, values, bound)}"


def _plot(across: Sequence[float], up: Sequence[float], bound: float | None) -> str:
    """Points with a line between them, and a line at the bound."""
    most_x, most_y = max(across) or 1, max([*up, bound or 0]) or 1
    right, bottom = _WIDTH - _MARGIN, _HEIGHT - _BELOW

    def x(value: float) -> float:
        return round(_LEFT + (right - _LEFT) * value / most_x, 1)

    def y(value: float) -> float:
        return round(bottom - (bottom - _MARGIN) * value / most_y, 1)

    points = list(zip(across, up, strict=True))
    line = " ".join(f"{x(a)},{y(u)}" for a, u in points)
    parts = [f'<path d="M{_LEFT},{_MARGIN}V{bottom}H{right}" stroke="currentColor" fill="none" opacity=".4"/>']
    parts.append(f'<polyline points="{line}" stroke="currentColor" fill="none"/>')
    parts += [
        f'<circle cx="{x(a)}" cy="{y(u)}" r="3.5" fill="currentColor"><title>{a:g}: {u:g}</title></circle>'
        for a, u in points
    ]
    if bound is not None:
        parts.append(f'<path d="M{_LEFT},{y(bound)}H{right}" stroke="#c62828"/>')
        parts.append(f'<text x="{right}" y="{y(bound) - 4}" text-anchor="end">bound {bound:g}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        level, length = most_y * share, most_x * share
        parts.append(f'<text x="{_LEFT - 6}" y="{y(level) + 4}" text-anchor="end">{level:.3g}</text>')
        parts.append(f'<text x="{x(length)}" y="{_HEIGHT - 8}" text-anchor="middle">{length:.0f}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">{"".join(parts)}</svg>'
