"""The official test suite of JSON Schema against the grammars: what is enforced, rejected by name, wrongly admitted.

    python -m benchmarks.json_schema_suite [optional | optional/format]

A text is admitted if an independent recogniser derives it from the grammar. Ends with status 1 if any instance is
admitted that its schema forbids.
"""

from __future__ import annotations

import sys

from tests.support.schema_suite import groups, run


def main(part: str = ".") -> int:
    """Print a line for each group, and the sums."""
    outcomes = [run(group) for group in groups(part)]
    for one in outcomes:
        if one.refusal is not None:
            print(f"rejected  {one.group.name}: {one.refusal}")
        else:
            print(f"enforced  {one.group.name}: {one.admitted} of {one.valid} valid instances are admitted")
        for text in one.forbidden:
            print(f"WRONG     {one.group.name}: {text} is admitted")
    enforced = [one for one in outcomes if one.refusal is None]
    wrong = sum(bool(one.forbidden) for one in outcomes)
    print(
        f"{len(outcomes)} groups: {len(enforced)} enforced, {len(outcomes) - len(enforced)} rejected, {wrong} wrong; "
        f"{sum(one.admitted for one in enforced)} of {sum(one.valid for one in enforced)} valid instances admitted"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
