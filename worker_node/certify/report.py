"""The report of a certification: one HTML file without anything from elsewhere, and a summary for an issue."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from worker_node.models.passports import CheckResult, Passport

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #c62828; --dim: #777; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .35rem .6rem; vertical-align: top;
border-bottom: 1px solid var(--line); } th { font-weight: 600; white-space: nowrap; }
.passed, .certified { color: var(--good); } .failed { color: var(--bad); font-weight: 600; }
.skipped { color: var(--dim); } .limited { color: #b26a00; font-weight: 600; }
.note { border-left: 3px solid #b26a00; padding-left: .8rem; } svg { max-width: 100%; height: auto; }
text { font: 11px system-ui, sans-serif; fill: currentColor; } code { font-size: .9em; overflow-wrap: anywhere; }
"""


def page(passport: Passport) -> str:
    """The report as HTML."""
    facts = {
        "Model": f"{passport.model} ({passport.model_hash[:16]}…)",
        "Device": f"{passport.device}, {passport.architecture}",
        "Driver, compiler": f"{passport.driver or '-'}, {passport.compiler or '-'}",
        "OpenVINO": passport.openvino,
        "Node": f"{passport.node}, npu-node {passport.version}",
        "Made": passport.made,
        "Compared with": f"a CPU's answers ({passport.reference})",
        "Signed by": passport.signature.key if passport.signature else "nobody",
    }
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td><code>{escape(value)}</code></td></tr>" for name, value in facts.items()
    )
    checks = "".join(
        f'<tr><td>{escape(check.name)}</td><td class="{check.status}">{check.status}</td>'
        f"<td>{escape(check.detail)}</td>"
        f"<td>{', '.join(map(str, check.facts))}</td></tr>"
        for check in passport.checks
    )
    emulated = (
        '<p class="note">Emulated on a CPU: this says nothing about real hardware.</p>' if passport.emulated else ""
    )
    limit = passport.limits.max_prompt_tokens
    said = f"prompts up to {limit} tokens" if limit else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(passport.model)} on {passport.device}: {passport.headline}</title>"
        f"<style>{_STYLE}</style></head><body>"
        f"<h1>{escape(passport.model)} on {passport.device}: "
        f'<span class="{passport.verdict}">{passport.headline}</span></h1><p>{escape(said)}</p>{emulated}'
        f"<h2>What it holds for</h2><table>{rows}</table>"
        f"<h2>Checks</h2><table><tr><th>check</th><th>result</th><th>found</th><th>facts</th></tr>{checks}</table>"
        "<p>Facts are the numbers of docs/npu-facts.md.</p>"
        f"{_plots(passport.checks)}</body></html>\n"
    )


def _plots(checks: Sequence[CheckResult]) -> str:
    parts = []
    for check in checks:
        lengths = check.values.get("lengths")
        if not isinstance(lengths, list):
            continue
        for name, what in (
            ("first_token_s", "Seconds to the first token, by tokens of the prompt"),
            ("margins", "How much likelier the CPU finds another token where answers part, by tokens of the prompt"),
        ):
            values = check.values.get(name)
            if isinstance(values, list) and len(values) == len(lengths):
                bound = check.values.get("bound") if name == "margins" else None
                parts.append(f"<h2>{escape(what)}</h2>{plot(lengths, values, bound)}")
    return "".join(parts)


def plot(across: Sequence[float], up: Sequence[float], bound: float | None = None) -> str:
    """Points with a line between them, and a line at the bound."""
    width, height, left, below = 640, 220, 48, 28
    most_x, most_y = max(across) or 1, max([*up, bound or 0]) or 1

    def x(value: float) -> float:
        return left + (width - left - 12) * value / most_x

    def y(value: float) -> float:
        return 10 + (height - below - 10) * (1 - value / most_y)

    line = " ".join(f"{x(a):.1f},{y(u):.1f}" for a, u in zip(across, up, strict=True))
    dots = "".join(
        f'<circle cx="{x(a):.1f}" cy="{y(u):.1f}" r="3.5"><title>{a:g}: {u:g}</title></circle>'
        for a, u in zip(across, up, strict=True)
    )
    limit = (
        f'<line x1="{left}" x2="{width}" y1="{y(bound):.1f}" y2="{y(bound):.1f}" stroke="#c62828"/>'
        f'<text x="{width - 4}" y="{y(bound) - 4:.1f}" text-anchor="end">bound {bound:g}</text>'
        if bound
        else ""
    )
    ticks = "".join(
        f'<text x="{left - 6}" y="{y(most_y * part) + 4:.1f}" text-anchor="end">{most_y * part:.3g}</text>'
        f'<text x="{x(most_x * part):.1f}" y="{height - 8}" text-anchor="middle">{most_x * part:.0f}</text>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<svg viewBox="0 0 {width + 12} {height}" width="{width + 12}" role="img">'
        '<g stroke="currentColor" fill="none">'
        f'<path d="M{left},10V{height - below}H{width}" opacity=".4"/><polyline points="{line}"/></g>'
        f'<g fill="currentColor">{dots}</g>{limit}{ticks}</svg>'
    )


def summary(passport: Passport) -> str:
    """What an issue can take, in Markdown."""
    lines = [
        f"### {passport.model} on {passport.device}: {passport.headline}",
        "",
        f"{passport.architecture}; driver {passport.driver or '-'}, compiler {passport.compiler or '-'}, OpenVINO "
        f"{passport.openvino}, npu-node {passport.version}, {passport.made}, compared with {passport.reference}",
        "",
        "| check | result | found |",
        "|---|---|---|",
    ]
    lines += [f"| {check.name} | {check.status} | {check.detail.replace('|', '/')} |" for check in passport.checks]
    return "\n".join(lines) + "\n"
