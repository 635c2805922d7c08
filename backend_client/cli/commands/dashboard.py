"""`npu-client dashboard`: a page that shows every node of the fleet, live."""

from __future__ import annotations

import argparse
import asyncio

from backend_client.cli.dashboard import served
from backend_client.client import NPUClient
from backend_client.settings import ClientSettings


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("dashboard", help="serve a page with every node, live", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (a free one)")
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Serve until interrupted."""
    async with NPUClient.from_settings(settings) as client, served(client, settings.api_key, args.port) as url:
        print(f"the dashboard is at {url}", flush=True)
        await asyncio.Event().wait()
    return 0
