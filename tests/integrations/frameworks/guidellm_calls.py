"""guidellm, the load generator: a short benchmark with streams; every request must be answered."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = os.environ["NODE_URL"], os.environ.get("NODE_MODEL", "smollm2")
with tempfile.TemporaryDirectory() as directory:
    prompts, report = Path(directory) / "prompts.csv", Path(directory) / "report.json"
    # With a length, as without one a small model may write until its context is full.
    lines = [f"Tell me story number {number} of a cat.,16" for number in range(8)]
    prompts.write_text("\n".join(["prompt,output_tokens_count", *lines]) + "\n")
    command = [Path(sys.executable).parent / "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={URL},model={MODEL}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=8"]
    command += ["--data", f"kind=csv_file,path={prompts}", "--output", f"kind=json,path={report}"]
    subprocess.run(command, check=True)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 8, totals
print("all as expected")
