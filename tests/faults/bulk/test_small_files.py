"""Many small files are served side by side: one request each would have every file wait for the one before."""

import asyncio
import json

from backend_client.bulk import BulkRequest, ExitCode, run_job
from backend_client.settings import ClientSettings
from tests.faults.bulk.data_sets import rows_of
from tests.faults.scripted_node import ScriptedNode

FILES, AT_ONCE = 12, 3


async def test_small_files_of_one_slot_are_under_way_together(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": f"file {number}"}) + "\n")
    together = asyncio.Event()
    waiting = set()

    async def respond(request):
        texts = (await request.json())["texts"]
        if any(text.startswith("file ") for text in texts):
            waiting.update(texts)
            if len(waiting) >= AT_ONCE:
                together.set()
            await together.wait()

    async with ScriptedNode().running() as node:
        node.respond = respond
        request = BulkRequest(
            kind="embed", source=str(folder), out=str(out), column="text", window=1, concurrency=AT_ONCE
        )
        # Ends here only if the files wait for each other.
        async with asyncio.timeout(60):
            report = await run_job(request, ClientSettings.load(nodes=[node.url]))
    assert (report.exit_code, report.rows, report.done) == (ExitCode.COMPLETE, FILES, FILES)
    assert set(rows_of(out)) == {f"file {number}" for number in range(FILES)}
