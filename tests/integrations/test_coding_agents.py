"""Coding agents from npm against a node and through the gateway, set up by the recipes of docs/other-tools.md.

The chat model is scripted: it calls the agent's tool that runs a command, and ends when the command's output comes
back. The agents send what they send to any server, and the node checks it as it checks everything.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integrations.scripted_agent import FINAL, AgentEngine, long_context_store, scripted_agent
from tests.support.foreign import npm_packages
from tests.support.gateway import WAYS, start_gateway

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
DOC = (HERE.parents[1] / "docs" / "other-tools.md").read_text(encoding="utf-8")
TASK = "Run the command."
# Its output is in no request before the agent has run it.
COMMAND, OUTPUT = "echo $((20 * 21)) printed", "420 printed"
# Telemetry and updates are turned off; what an agent sends elsewhere all the same goes to a proxy that is not there.
QUIET = {
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "CONTINUE_API_BASE": "http://127.0.0.1:9/",
    "CONTINUE_METRICS_ENABLED": "0",
}
QUIET |= {"NO_PROXY": "127.0.0.1"}
QUIET |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLINE_NO_AUTO_UPDATE": "1", "DO_NOT_TRACK": "1"}
LIMIT_S = 200


@pytest.fixture(scope="module")
def agents():
    """The directory of the agents' commands."""
    packages = npm_packages(HERE / "coding_agents" / "package.json")
    # npm's own link leads to a file that the package's installation script replaces; the package has this for where
    # scripts do not run.
    (claude := packages / "node_modules" / ".bin" / "claude").unlink(missing_ok=True)
    claude.symlink_to("../@anthropic-ai/claude-code/cli-wrapper.cjs")
    claude.resolve().chmod(0o755)
    return claude.parent


@pytest.fixture(scope="module")
def agent_store(store, tmp_path_factory):
    return long_context_store(store, tmp_path_factory.mktemp("store"))


@contextlib.asynccontextmanager
async def reached(engine, store, way):
    """The URL of a node with this engine, or of a gateway in front of it."""
    async with scripted_agent(store, engine) as url:
        if way == WAYS[0]:
            yield url
            return
        # In a thread: the gateway asks the node, which runs on this loop.
        with contextlib.ExitStack() as stack:
            yield await asyncio.to_thread(stack.enter_context, start_gateway(url))
            await asyncio.to_thread(stack.pop_all().close)


def recipe(title, url):
    """The block below a heading, for this address and the scripted model."""
    block = re.search(rf"\n### {title}\n.*?```\w+\n(.*?)```", DOC, re.DOTALL)[1]
    return re.sub(r"\bMODEL\b", "smollm2", block.replace("http://127.0.0.1:8081", url))


def codex(home, url):
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(recipe("Codex", url) + "\n[analytics]\nenabled = false\n")
    return f'codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "{TASK}"'


def claude_code(home, url):
    return recipe("Claude Code", url).rstrip() + f' --print "{TASK}" --allowedTools Bash'


def cline(home, url):
    (settings := home / ".cline" / "data" / "settings").mkdir(parents=True)
    (settings / "global-settings.json").write_text('{"telemetryOptOut": true}')
    return recipe("Cline", url) + f'cline --json "{TASK}"'


def continue_(home, url):
    (home / "config.yaml").write_text(recipe("Continue", url))
    return f'cn --config {home}/config.yaml --auto --print "{TASK}"'


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("agent", "tool", "arguments"),
    [
        (codex, "exec_command", {"cmd": COMMAND}),
        (claude_code, "Bash", {"command": COMMAND, "description": TASK}),
        (cline, "run_commands", {"commands": [COMMAND]}),
        (continue_, "Bash", {"command": COMMAND}),
    ],
    ids=["Codex", "Claude Code", "Cline", "Continue"],
)
async def test_a_coding_agent_runs_a_command_and_reads_its_output(
    agents, agent_store, tmp_path, agent, tool, arguments, way
):
    engine = AgentEngine(tool, arguments, OUTPUT)
    (work := tmp_path / "work").mkdir()
    (home := tmp_path / "home").mkdir()
    env = {"HOME": str(home), "PATH": f"{agents}:{os.environ['PATH']}", "NPU_NODE_API_KEY": "unused"} | QUIET
    async with reached(engine, agent_store, way) as url:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-ec", agent(home, url)),
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                said = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    assert (process.returncode, FINAL in said) == (0, True), said[-4000:]
    assert engine.rounds == {"call": 1, "final": 1}
