"""A node is installed with the extra `node` alone (Ansible, packages): it serves without what the others bring.

Nor does it import the client, whose pages it shows, nor a tracing that is off.
"""

import subprocess
import sys

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"av", "gguf", "huggingface_hub", "PIL", "safetensors", "tqdm"} or name in {
            "opentelemetry.exporter", "opentelemetry.sdk"
        }:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import worker_node.bounded.profile
import worker_node.cli.main
import worker_node.cli.serve
import worker_node.server
from worker_node import registry
from worker_node.http import pages
from worker_node.observability.tracing import open_tracing

pages.read_pages()
open_tracing(enabled=False)

for task in registry.tasks().values():
    registry.load(task.serving)
    if task.api is not None:
        registry.load(task.api)
assert "backend_client" not in sys.modules
print(*sorted(registry.tasks()))
"""


def test_serving_every_task_imports_no_other_extra():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert len(done.stdout.split()) >= 5


GATEWAY = """
import sys
sys.modules["limits"] = None
from backend_client.gateway.cli import main
sys.exit(main(["serve", "--port", "0", "--node", "http://127.0.0.1:1"]))
"""


def test_a_gateway_in_the_environment_of_a_node_names_the_extra_that_it_needs():
    done = subprocess.run([sys.executable, "-c", GATEWAY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "npu-gateway: the gateway needs more packages (limits): pip install '.[gateway]' in the project's checkout\n",
    )
