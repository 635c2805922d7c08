"""What the cloud costs a service that has one, before its first call and in it."""

import subprocess
import sys


def test_the_first_call_to_the_cloud_imports_nothing_and_reads_no_certificates():
    # More than 5 s on a busy machine: an interpreter that has not imported the SDK yet.
    script = """
import asyncio, ssl, sys
from backend_client import CloudClient, CloudSettings
from backend_client.errors import CloudUnavailable

def forbidden(*_, **__):
    raise AssertionError("certificates are read during a call")

async def main():
    settings = CloudSettings(api_key="k", base_url="http://127.0.0.1:1/v1", chat_model="c", embedding_models={"s": "e"})
    client = CloudClient(settings)
    ssl.SSLContext.load_verify_locations = ssl.create_default_context = forbidden
    before = set(sys.modules)
    for call in (client.embed("text"), client.generate("text")):
        try:
            await call
        except CloudUnavailable:
            pass
    print(sorted(name for name in set(sys.modules) - before if name.startswith("openai.")))
    await client.close()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
