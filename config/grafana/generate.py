"""Write the dashboards for Grafana 11.6 and newer.

python config/grafana/generate.py [DIRECTORY]

Needs the extra `dashboards`, which pins the SDK and with it the schema.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fleet_dashboard import fleet_dashboard
from gateway_dashboard import gateway_dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from node_dashboard import node_dashboard


def main(directory: Path) -> None:
    """Write node.json, fleet.json and gateway.json there."""
    for name, built in (("node", node_dashboard()), ("fleet", fleet_dashboard()), ("gateway", gateway_dashboard())):
        model = built.build()
        for number, panel in enumerate(model.panels or (), start=1):
            panel.id_val = number
        text = json.dumps(model, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False)
        (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
