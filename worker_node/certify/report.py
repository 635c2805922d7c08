"""The report of a certification: one HTML file that needs nothing from elsewhere, and a summary for an issue."""

from __future__ import annotations

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
td { overflow-wrap: anywhere; }
"""
_EMULATED = "Emulated on a CPU: this says nothing about real hardware."


def summary(passport: Passport) -> str:
    facts = "; ".join(f"{name} {value}" for name, value in _facts(passport).items())
    lines = [f"### {_heading(passport)}", "", facts, ""]
    if passport.emulated:
        lines += [_EMULATED, ""]
    lines += ["| check | result | found |", "|---|---|---|"]
    lines += [f"| {check.name} | {check.status} | {check.detail.replace('|', '/')} |" for check in passport.checks]
    return "\n".join(lines) + "\n"


def page(passport: Passport) -> str:
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
